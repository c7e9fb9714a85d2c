#include "trainer/train_epoch_loop.h"

#include <c10/util/StringUtil.h>

#include <optional>

#include "core/error.h"

namespace fulgur {
namespace {

// A loss must be something that backward can start from; an undefined one skips the batch.
void check_loss(const Module& module, const at::Tensor& loss) {
  if (!loss.defined()) return;
  if (loss.numel() != 1) {
    throw SetupError(c10::str(module.name(), "::training_step must return a scalar loss; got a tensor of shape ",
                              loss.sizes(), "; return its mean() or sum()"));
  }
  if (!loss.requires_grad()) {
    throw SetupError(c10::str(module.name(),
                              "::training_step returned a loss that no parameter had a part in (it does ",
                              "not require grad); was it detached, or computed under NoGradGuard?"));
  }
}

}  // namespace

void TrainEpochLoop::run() {
  RunState& state = context_.state;
  state.batch_idx = 0;
  loader_.begin_epoch(state.epoch);
  while (!context_.should_stop && !max_steps_reached()) {
    const std::optional<Batch> batch = loader_.next();
    if (!batch) break;
    run_batch(context_.strategy.to_device(*batch));
    ++state.batch_idx;
  }
}

bool TrainEpochLoop::max_steps_reached() const {
  return context_.options.max_steps >= 0 && context_.state.global_step >= context_.options.max_steps;
}

void TrainEpochLoop::run_batch(const Batch& batch) {
  HookCaller& hooks = context_.hooks;
  const int64_t batch_idx = context_.state.batch_idx;
  const LogScope scope = LogScope::training_step;
  hooks.call(scope, &batch, &Callback::on_train_batch_start, &Module::on_train_batch_start, batch, batch_idx);
  at::Tensor loss = context_.strategy.training_step(batch, batch_idx);
  check_loss(hooks.module(), loss);
  const bool stepped = loss.defined();
  if (stepped) {
    optimize(batch, loss);
    loss = loss.detach();  // the graph has served
  }
  hooks.call(scope, &batch, &Callback::on_train_batch_end, &Module::on_train_batch_end, loss, batch, batch_idx);
  if (!stepped) return;
  log_step_metrics();
  ++context_.state.batches_that_stepped;
}

void TrainEpochLoop::optimize(const Batch& batch, const at::Tensor& loss) {
  HookCaller& hooks = context_.hooks;
  const LogScope scope = LogScope::training_step;
  hooks.call(scope, &batch, &Callback::on_before_zero_grad, &Module::on_before_zero_grad);
  context_.strategy.zero_grad();
  hooks.call(scope, &batch, &Callback::on_before_backward, &Module::on_before_backward, loss);
  context_.strategy.backward(loss);
  hooks.call(scope, &batch, &Callback::on_after_backward, &Module::on_after_backward);
  hooks.call(scope, &batch, &Callback::on_before_optimizer_step, &Module::on_before_optimizer_step);
  context_.strategy.optimizer_step();
  ++context_.state.global_step;
}

void TrainEpochLoop::log_step_metrics() {
  const int64_t step = context_.state.batches_that_stepped;
  if ((step + 1) % context_.options.log_every_n_steps != 0 && !context_.should_stop) return;
  const Metrics metrics = context_.metrics.step_metrics();
  if (metrics.empty()) return;
  context_.hooks.call_callbacks(LogScope::forbidden, any_callback, &Callback::on_metrics, metrics, step);
}

}  // namespace fulgur
