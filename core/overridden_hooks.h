#pragma once

#include <concepts>

#include "fulgur/core/module.h"

namespace fulgur {

// A hook counts as inherited only if &T::hook is well-formed and is exactly Module's own; anything else (an overload, a
// private override, a mixin's) counts as overridden, so an override is never missed.
#define FULGUR_OVERRIDES(T, hook) (!requires { requires std::same_as<decltype(&T::hook), decltype(&Module::hook)>; })

template <std::derived_from<Module> T>
constexpr OverriddenHooks overridden_hooks() {
  return {.training_step = FULGUR_OVERRIDES(T, training_step),
          .configure_optimizers = FULGUR_OVERRIDES(T, configure_optimizers),
          .validation_step = FULGUR_OVERRIDES(T, validation_step),
          .test_step = FULGUR_OVERRIDES(T, test_step),
          .predict_step = FULGUR_OVERRIDES(T, predict_step),
          .backward = FULGUR_OVERRIDES(T, backward),
          .on_after_backward = FULGUR_OVERRIDES(T, on_after_backward),
          .on_before_optimizer_step = FULGUR_OVERRIDES(T, on_before_optimizer_step),
          .configure_gradient_clipping = FULGUR_OVERRIDES(T, configure_gradient_clipping),
          .transfer_batch_to_device = FULGUR_OVERRIDES(T, transfer_batch_to_device)};
}

#undef FULGUR_OVERRIDES

}  // namespace fulgur
