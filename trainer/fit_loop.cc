#include "trainer/fit_loop.h"

#include <functional>

#include "trainer/evaluation_loop.h"

namespace fulgur {

FitLoop::FitLoop(LoopContext& context, Loader& train, Loader* val)
    : context_(context), train_epoch_(context, train), val_(val), num_train_batches_(train.num_batches()) {}

void FitLoop::run() {
  HookCaller& hooks = context_.hooks;
  context_.state.stage = Stage::train;
  context_.state.num_batches = num_train_batches_;
  hooks.call(LogScope::forbidden, &Callback::on_fit_start, &Module::on_fit_start);
  hooks.module().train();
  hooks.call(LogScope::epoch, &Callback::on_train_start, &Module::on_train_start);
  while (!done()) run_epoch();
  hooks.call(LogScope::forbidden, &Callback::on_train_end, &Module::on_train_end);
  hooks.call(LogScope::forbidden, &Callback::on_fit_end, &Module::on_fit_end);
}

bool FitLoop::done() const {
  const int64_t max_epochs = context_.options.max_epochs;
  return context_.should_stop || train_epoch_.max_steps_reached() ||
         (max_epochs >= 0 && context_.state.epoch >= max_epochs);
}

void FitLoop::run_epoch() {
  context_.metrics.begin_epoch(Stage::train);
  context_.hooks.call(LogScope::epoch, &Callback::on_train_epoch_start, &Module::on_train_epoch_start);
  train_epoch_.run();
  if (validation_due()) run_evaluation(context_, Stage::validate, *val_);
  end_epoch();
  ++context_.state.epoch;
}

bool FitLoop::validation_due() const {
  return val_ != nullptr && (context_.state.epoch + 1) % context_.options.check_val_every_n_epoch == 0;
}

// ModelCheckpoint comes after the Module here, so that it finds what was logged in on_train_epoch_end.
void FitLoop::end_epoch() {
  HookCaller& hooks = context_.hooks;
  const auto runs_last = [](const Callback& callback) { return callback.runs_last(); };
  hooks.call_callbacks(LogScope::epoch, std::not_fn(runs_last), &Callback::on_train_epoch_end);
  hooks.module().on_train_epoch_end();
  const Metrics metrics = context_.metrics.end_epoch(Stage::train);
  hooks.call_callbacks(LogScope::forbidden, runs_last, &Callback::on_train_epoch_end);
  if (metrics.empty()) return;
  hooks.call_callbacks(LogScope::forbidden, any_callback, &Callback::on_metrics, metrics, context_.state.last_step());
}

}  // namespace fulgur
