#pragma once

#include "fulgur/core/callback.h"
#include "fulgur/core/hook.h"
#include "fulgur/core/module.h"

namespace fulgur::hooks {

// A hook that both callbacks and the Module have; the types hold its signature.
template <class CallbackMember, class ModuleMember>
struct SharedHook : Hook {
  CallbackMember callback;
  ModuleMember module;
};

// The hooks in firing order, with what log() may do in them. Hooks that only create or switch something (loaders,
// modes of the model) belong to the hook that calls them, or to none.
#define FULGUR_SHARED_HOOK(name, scope) \
  inline constexpr SharedHook name { Hook{#name, LogScope::scope}, &Callback::name, &Module::name }
#define FULGUR_HOOK(name, scope) \
  inline constexpr Hook name { #name, LogScope::scope }

FULGUR_HOOK(prepare_data, forbidden);
FULGUR_SHARED_HOOK(setup, forbidden);
FULGUR_HOOK(configure_model, forbidden);
FULGUR_HOOK(configure_optimizers, forbidden);
FULGUR_SHARED_HOOK(on_fit_start, forbidden);
FULGUR_HOOK(on_sanity_check_start, forbidden);
FULGUR_HOOK(on_sanity_check_end, forbidden);
FULGUR_SHARED_HOOK(on_train_start, epoch);
FULGUR_SHARED_HOOK(on_train_epoch_start, epoch);
FULGUR_HOOK(batch_transfer, forbidden);
FULGUR_SHARED_HOOK(on_train_batch_start, training_step);
FULGUR_HOOK(training_step, training_step);
FULGUR_SHARED_HOOK(on_before_zero_grad, training_step);
FULGUR_SHARED_HOOK(on_before_backward, training_step);
FULGUR_SHARED_HOOK(on_after_backward, training_step);
FULGUR_SHARED_HOOK(on_before_optimizer_step, training_step);
FULGUR_HOOK(configure_gradient_clipping, training_step);
FULGUR_HOOK(optimizer_step, training_step);
FULGUR_HOOK(accepts_update, training_step);
FULGUR_HOOK(lr_scheduler_step, forbidden);
FULGUR_SHARED_HOOK(on_train_batch_end, training_step);

FULGUR_SHARED_HOOK(on_validation_start, epoch);
FULGUR_SHARED_HOOK(on_validation_epoch_start, epoch);
FULGUR_SHARED_HOOK(on_validation_batch_start, evaluation_step);
FULGUR_HOOK(validation_step, evaluation_step);
FULGUR_SHARED_HOOK(on_validation_batch_end, evaluation_step);
FULGUR_SHARED_HOOK(on_validation_epoch_end, epoch);
FULGUR_SHARED_HOOK(on_validation_end, forbidden);

FULGUR_SHARED_HOOK(on_train_epoch_end, epoch);
FULGUR_SHARED_HOOK(on_train_end, forbidden);
FULGUR_SHARED_HOOK(on_fit_end, forbidden);

FULGUR_SHARED_HOOK(on_test_start, epoch);
FULGUR_SHARED_HOOK(on_test_epoch_start, epoch);
FULGUR_SHARED_HOOK(on_test_batch_start, evaluation_step);
FULGUR_HOOK(test_step, evaluation_step);
FULGUR_SHARED_HOOK(on_test_batch_end, evaluation_step);
FULGUR_SHARED_HOOK(on_test_epoch_end, epoch);
FULGUR_SHARED_HOOK(on_test_end, forbidden);

FULGUR_SHARED_HOOK(on_predict_start, forbidden);
FULGUR_SHARED_HOOK(on_predict_epoch_start, forbidden);
FULGUR_SHARED_HOOK(on_predict_batch_start, forbidden);
FULGUR_HOOK(predict_step, forbidden);
FULGUR_SHARED_HOOK(on_predict_batch_end, forbidden);
FULGUR_SHARED_HOOK(on_predict_epoch_end, forbidden);
FULGUR_SHARED_HOOK(on_predict_end, forbidden);

FULGUR_HOOK(on_metrics, forbidden);
FULGUR_HOOK(on_record, forbidden);
FULGUR_HOOK(on_exception, forbidden);
FULGUR_HOOK(on_checkpoint_saved, forbidden);
FULGUR_SHARED_HOOK(teardown, forbidden);

#undef FULGUR_SHARED_HOOK
#undef FULGUR_HOOK

}  // namespace fulgur::hooks
