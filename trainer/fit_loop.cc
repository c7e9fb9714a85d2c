#include "trainer/fit_loop.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/logging.h"

namespace fulgur {
namespace {

constexpr int64_t kDefaultMaxEpochs = 1000;  // Lightning's

int64_t max_epochs(const TrainerOptions& options) {
  if (options.max_epochs) return *options.max_epochs;
  if (options.max_steps >= 0 || options.max_time) return -1;
  log_warning("neither max_epochs, max_steps nor max_time is set; training for {} epochs", kDefaultMaxEpochs);
  return kDefaultMaxEpochs;
}

// Parts that the user put in eval mode stay in it; a whole model in eval mode was more likely forgotten there.
void warn_of_frozen_modes(const Module& module) {
  const auto modules = module.modules();
  const auto num_eval = std::ranges::count_if(modules, [](const auto& part) { return !part->is_training(); });
  if (num_eval > 0) {
    log_warning(
        "{} of the {} parts of {} are in eval mode and are trained so; call train() before fit if that is not meant",
        num_eval, modules.size(), module.name());
  }
}

}  // namespace

FitLoop::FitLoop(LoopContext& context, LoaderSources sources)
    : context_(context), sources_(std::move(sources)), data_(load()) {
  write_plan();
}

FitLoop::Data FitLoop::load() {
  const TrainerOptions& options = context_.options;
  auto train = sources_.train();
  const auto num_batches = options.limit_train_batches.of(train->num_batches(), "limit_train_batches");
  EvaluationLoaders val(sources_.val(), options.limit_val_batches, "limit_val_batches");
  return {std::move(train), num_batches, EvaluationLoop(context_, Stage::validate, std::move(val)),
          ValidationSchedule(options, num_batches)};
}

// What RunState says of the whole run.
void FitLoop::write_plan() {
  const TrainerOptions& options = context_.options;
  RunState& state = context_.state;
  state.stage = Stage::train;
  state.num_batches = data_->num_train_batches;
  state.max_epochs = max_epochs(options);
  state.has_validation = !data_->validation.empty();
  if (options.max_steps >= 0) state.estimated_stepping_batches = options.max_steps;
  if (data_->num_train_batches && state.max_epochs >= 0) {
    const int64_t accumulation = context_.accumulate_grad_batches;
    const int64_t steps = (*data_->num_train_batches + accumulation - 1) / accumulation * state.max_epochs;
    state.estimated_stepping_batches = std::min(steps, state.estimated_stepping_batches.value_or(steps));
  }
}

void FitLoop::run(OptimizerSteps& steps) {
  HookCaller& hooks = context_.hooks;
  hooks(hooks::on_fit_start);
  const bool nothing_to_do =
      data_->num_train_batches == 0 || context_.state.max_epochs == 0 || context_.options.max_steps == 0;
  if (!nothing_to_do) train(steps);
  hooks(hooks::on_fit_end);
}

void FitLoop::train(OptimizerSteps& steps) {
  HookCaller& hooks = context_.hooks;
  if (!data_->validation.empty() && *context_.options.num_sanity_val_steps != 0) {
    data_->validation.run_sanity_check(*context_.options.num_sanity_val_steps);
  }
  warn_of_frozen_modes(hooks.module());
  context_.metrics.begin_epoch(Stage::train);
  hooks(hooks::on_train_start);
  FitBounds bounds(context_.options, context_.state, context_.stop_requested);
  while (!bounds.done()) run_epoch(steps, bounds);
  hooks(hooks::on_train_end);
}

void FitLoop::run_epoch(OptimizerSteps& steps, FitBounds& bounds) {
  RunState& state = context_.state;
  const int64_t reload_every = context_.options.reload_dataloaders_every_n_epochs;
  if (reload_every > 0 && state.epoch > 0 && state.epoch % reload_every == 0) data_.emplace(load());
  const int64_t steps_before = state.global_step;
  context_.hooks(hooks::on_train_epoch_start);
  TrainEpochLoop(context_, steps, bounds, data_->validation, data_->schedule, total_batches_)
      .run(*data_->train, data_->num_train_batches);
  if (state.global_step == steps_before && !told_idle_ && !bounds.done()) {
    told_idle_ = true;
    log_warning("epoch {} ended without an optimizer step: every batch was skipped", state.epoch);
  }
  end_epoch(steps);
  ++state.epoch;
}

// ModelCheckpoint comes after the Module here, so that it finds what was logged in on_train_epoch_end.
void FitLoop::end_epoch(OptimizerSteps& steps) {
  HookCaller& hooks = context_.hooks;
  const auto runs_last = [](const Callback& callback) { return callback.runs_last(); };
  Metrics metrics = context_.metrics.end_epoch(Stage::train, &context_.strategy);
  hooks.callbacks_where(std::not_fn(runs_last), hooks::on_train_epoch_end, &Callback::on_train_epoch_end);
  {
    const auto scope = hooks.enter(hooks::on_train_epoch_end);
    hooks.module().on_train_epoch_end();
  }
  metrics.merge(context_.metrics.end_epoch(Stage::train, &context_.strategy));
  static constexpr Hook kReduced{"on_train_epoch_end", LogScope::forbidden};
  hooks.callbacks_where(runs_last, kReduced, &Callback::on_train_epoch_end);
  if (hooks.module().automatic_optimization) steps.move_schedules("epoch", OptimizerSteps::Kind::plateau);
  hooks.send(metrics, context_.state.last_step());
}

}  // namespace fulgur
