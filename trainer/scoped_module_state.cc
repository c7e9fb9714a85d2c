#include "fulgur/trainer/scoped_module_state.h"

#include <c10/core/GradMode.h>

#include <exception>

#include "fulgur/base/logging.h"
#include "fulgur/core/module.h"
#include "fulgur/core/module_state.h"

namespace fulgur {

ScopedModuleState::ScopedModuleState(Module& module) : module_(module) {
  for (const auto& [name, tensor] : named_state(module)) {
    state_.emplace(name, tensor.detach().clone());
    if (tensor.grad().defined()) gradients_.emplace(name, tensor.grad().detach().clone());
  }
}

ScopedModuleState::~ScopedModuleState() {
  try {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, now] : named_state(module_)) {
      at::Tensor tensor = now;
      if (const auto before = state_.find(name); before != state_.end()) tensor.copy_(before->second);
      const auto gradient = gradients_.find(name);
      if (gradient != gradients_.end()) {
        tensor.mutable_grad() = gradient->second.to(tensor.options());
      } else if (tensor.grad().defined()) {
        tensor.mutable_grad().reset();
      }
    }
  } catch (const std::exception& error) {
    log_warning("the module could not be put back as it was: {}", error.what());
  }
}

}  // namespace fulgur
