#include "fulgur/loops/train_epoch_loop.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/seed.h"
#include "fulgur/base/trace.h"

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

// Throws if an element of the loss is not finite. In manual optimisation the step may return any tensor.
void check_finite(const Module& module, const at::Tensor& loss, int64_t batch_idx) {
  if (!loss.defined()) return;
  const at::Tensor is_wrong = loss.detach().isfinite().logical_not();
  if (!is_wrong.any().item<bool>()) return;
  const auto value = loss.detach().masked_select(is_wrong)[0].item<double>();
  TORCH_CHECK(false, "detect_anomaly: ", module.name(), "::training_step returned a loss of ", value, " for batch ",
              batch_idx, "; is there a division by 0 or a log(0) in it, or is the learning rate too high?");
}

// Adds the seconds of its lifetime to `sum_s`.
class ScopedTimer {
 public:
  explicit ScopedTimer(double& sum_s) : sum_s_(sum_s) {}
  ~ScopedTimer() { sum_s_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& sum_s_;
  const Clock::time_point start_ = Clock::now();
};

// Calls what reads the train loader, and counts the time that it takes.
template <class Read>
auto reading(LoopContext& context, const Read& read) {
  const ScopedTimer waits(context.state.data_wait_s);
  const trace::Span span("wait for data");
  return context.hooks.located("the train loader", HookCaller::WhatRuns::batch, read);
}

}  // namespace

void TrainEpochLoop::run(Loader& loader, std::optional<int64_t> limit, bool lockstep, const ResumePoint* resumed) {
  const auto consumed = resumed != nullptr ? resumed->consumed : LimitedBatches::Consumed{};
  begin(consumed, resumed != nullptr ? resumed->accumulation : std::nullopt);
  progress_.had_last = resumed != nullptr && resumed->had_last;
  const bool validated = resumed != nullptr && go_on(*resumed);
  LimitedBatches batches = open(loader, limit, lockstep, consumed, /*resumes=*/resumed != nullptr);
  if (batches.empty() && !progress_.had_last) end_without_batch(/*validates=*/!validated);
  const bool skips = run_batches(batches) == BatchAction::skip_epoch;
  const bool reached_last = context_.state.is_last_batch && !skips;
  if (skips) complete_window();
  if (skips || skipped_) {
    context_.events.roll_back_if_asked();
    context_.strategy.drain();
  }
  context_.state.epoch_is_complete = reached_last || skips || ended_;
  if (!reached_last && context_.state.epoch_is_complete && context_.hooks.module().automatic_optimization)
    steps_.move_schedules("epoch", OptimizerSteps::Kind::plain);
}

void TrainEpochLoop::begin(const LimitedBatches::Consumed& consumed, std::optional<int64_t> accumulation) {
  RunState& state = context_.state;
  state.batch_idx = progress_.batches_done = consumed.batches;
  state.is_last_batch = false;
  progress_.position = consumed.position;
  progress_.is_recut = consumed.is_recut;
  progress_.epoch = state.epoch;
  state.epoch_is_complete = false;
  accumulate_grad_batches_ = progress_.accumulation = accumulation.value_or(context_.accumulate_grad_batches);
  steps_.check_accumulation(accumulate_grad_batches_);
}

// Begins the epoch of the loader.
LimitedBatches TrainEpochLoop::open(Loader& loader, std::optional<int64_t> limit, bool lockstep,
                                    const LimitedBatches::Consumed& consumed, bool resumes) {
  RunState& state = context_.state;
  const auto random = resumes ? std::optional(RandomState::now()) : std::nullopt;
  LimitedBatches batches = reading(context_, [&] {
    return LimitedBatches(loader, state.epoch, limit, lockstep ? &context_.ranks : nullptr, consumed);
  });
  if (resumes) {
    random->restore();  // undoes the draws of begin_epoch, which the checkpoint's generators include
    state.is_last_batch = batches.empty();
  } else if (batches.empty()) {
    throw SetupError(
        c10::str("the train loader yields no batch in epoch ", state.epoch, "; can it be read only once?"));
  }
  return batches;
}

BatchAction TrainEpochLoop::run_batches(LimitedBatches& batches) {
  RunState& state = context_.state;
  while (!batches.empty() && !ended_ && !ends_here()) {
    Batch batch = context_.to_device(reading(context_, [&] { return batches.take(); }));
    state.is_last_batch = batches.empty();
    if (window_batches_ == 0) context_.metrics.begin_step(Stage::train);
    {
      const RunningBatch running(context_, std::move(batch));
      const BatchAction action = context_.hooks.train_batch_start(*running, state.batch_idx);
      if (action == BatchAction::skip_epoch) return action;
      run_batch(*running, batches);
    }
    if (skipped_) {  // on another rank, which runs neither a validation nor a checkpoint after this batch
      if (stepped_) steps_.move_schedules("step", OptimizerSteps::Kind::plateau);
      break;
    }
    if (window_batches_ == 0) context_.events.roll_back_if_asked();
    if (state.is_last_batch || ended_ || ends_here())
      context_.strategy.drain();  // the code that runs next may read the weights
    look_at_schedule();
    if (window_batches_ == 0) validate_after_batch(validation_is_due());
    ++state.batch_idx;
    if (window_batches_ == 0) at_boundary();
  }
  return BatchAction::run;
}

// Ends what a skipped epoch leaves in its middle: an accumulation window, or a step that the other ranks take.
void TrainEpochLoop::complete_window() {
  const bool others_wait = context_.ranks.world_size() > 1 && context_.hooks.module().automatic_optimization;
  if (others_wait && steps_.needs_closure()) {
    steps_.skip_closure();
  } else if (window_batches_ > 0 || others_wait) {
    end_micro_batch(/*is_last=*/true, EndsEpoch::by_skipping);
    count_step();
    if (stepped_) steps_.move_schedules("step", OptimizerSteps::Kind::plateau);
  }
}

// Ends an epoch that was begun with another batch size or number of ranks, if what is left of it does not fill a batch:
// does what follows the last batch of any other epoch.
void TrainEpochLoop::end_without_batch(bool validates) {
  RunState& state = context_.state;
  progress_.had_last = true;
  stepped_ = false;
  if (context_.hooks.module().automatic_optimization) steps_.move_schedules("epoch", OptimizerSteps::Kind::plain);
  context_.strategy.drain();
  state.batch_idx = std::max<int64_t>(progress_.batches_done - 1, 0);
  if (validates) look_at_schedule();
  validate_after_batch(validates && validation_is_due());
  state.batch_idx = progress_.batches_done;
  at_boundary();
}

// Resumes an epoch that another process began, with the validation that it may have left incomplete. Returns whether
// there was one.
bool TrainEpochLoop::go_on(const ResumePoint& resumed) {
  resumed.restore();
  const auto due = std::exchange(progress_.interrupted_validation, std::nullopt);
  if (!due) return false;
  RunState& state = context_.state;
  stepped_ = due->after_step;
  state.is_last_batch = due->is_last_batch;
  state.batch_idx = std::max<int64_t>(resumed.consumed.batches - 1, 0);
  validate_after_batch(/*is_due=*/true);
  state.batch_idx = resumed.consumed.batches;
  at_boundary();
  return true;
}

void TrainEpochLoop::at_boundary() {
  context_.events.roll_back_if_asked();  // a hook of the validation may have requested it
  if (!progress_.interrupted_validation)
    context_.events.on_step_boundary();  // a validation that is still due comes first, in the run that resumes
  context_.saver.at_boundary();
  bounds_.look_for_signal();
  if (bounds_.signal() != 0) context_.events.interrupt(bounds_.signal());
}

bool TrainEpochLoop::ends_here() {
  return window_batches_ == 0 && (bounds_.max_steps_reached() || bounds_.should_stop());
}

void TrainEpochLoop::run_batch(const Batch& batch, const LimitedBatches& batches) {
  const bool automatic = context_.hooks.module().automatic_optimization;
  const at::Tensor loss = automatic ? run_automatic(batch) : run_manual(batch);
  context_.non_finite.look_at_loss(loss, context_.state);
  ++progress_.total_batches;
  if (window_batches_ == 0) {
    progress_.batches_done = context_.state.batch_idx + 1;
    progress_.position = batches.position();
    progress_.had_last = context_.state.is_last_batch;
  }
  if (automatic && context_.state.is_last_batch) steps_.move_schedules("epoch", OptimizerSteps::Kind::plain);
  context_.hooks(hooks::on_train_batch_end, loss, batch, context_.state.batch_idx);
  if (context_.ranks.world_size() == 1) bounds_.agree();  // several ranks agree within the step
  count_step();
}

at::Tensor TrainEpochLoop::run_automatic(const Batch& batch) {
  stepped_ = false;
  if (steps_.needs_closure()) return run_closure(batch);
  ++window_batches_;
  const bool is_last = window_batches_ == accumulate_grad_batches_ || context_.state.is_last_batch;
  const at::Tensor loss = run_micro_batch(batch, is_last);
  end_micro_batch(is_last, context_.state.is_last_batch ? EndsEpoch::without_further_batch : EndsEpoch::no);
  return loss;
}

at::Tensor TrainEpochLoop::run_micro_batch(const Batch& batch, bool is_last) {
  const at::Tensor loss = training_step(batch);
  if (!loss.defined()) return loss;
  if (micro_batches_ == 0) steps_.zero_grad(0);
  steps_.backward(loss, is_last);
  ++micro_batches_;
  if (steps_.judges_updates()) loss_sum_ += loss.item<double>();
  return loss.variable_data();  // without its graph, and without detach()'s trip through the dispatcher
}

at::Tensor TrainEpochLoop::run_closure(const Batch& batch) {
  at::Tensor first;
  stepped_ = steps_.step([&] {
    const at::Tensor loss = training_step(batch);
    TORCH_CHECK(loss.defined(), context_.hooks.module().name(), "::training_step skipped the batch, but ",
                steps_.optimizers()[0].name(),
                " needs a loss for each; return one, or use an optimizer that takes gradients as they are");
    steps_.zero_grad(0);
    steps_.backward(loss, /*is_last=*/true);
    if (!first.defined()) first = loss.detach();
    return loss.detach();
  });
  if (stepped_) steps_.move_schedules("step", OptimizerSteps::Kind::plain);
  bounds_.agree();
  return first;
}

at::Tensor TrainEpochLoop::run_manual(const Batch& batch) {
  return context_.hooks.within(hooks::training_step, [&] {
    const at::Tensor loss = context_.strategy.training_step(batch, context_.state.batch_idx);
    stepped_ = true;
    bounds_.agree();
    if (context_.plan.detect_anomaly) check_finite(context_.hooks.module(), loss, context_.state.batch_idx);
    return loss.defined() ? loss.detach() : loss;
  });
}

at::Tensor TrainEpochLoop::training_step(const Batch& batch) {
  return context_.hooks.within(hooks::training_step, [&] {
    const at::Tensor loss = context_.strategy.training_step(batch, context_.state.batch_idx);
    check_loss(context_.hooks.module(), loss);
    if (context_.plan.detect_anomaly) check_finite(context_.hooks.module(), loss, context_.state.batch_idx);
    return loss;
  });
}

void TrainEpochLoop::end_micro_batch(bool is_last, EndsEpoch ends) {
  const AccumulationWindow all = context_.strategy.end_micro_batch({.micro_batches = micro_batches_,
                                                                    .loss_sum = loss_sum_,
                                                                    .wants_stop = is_last && bounds_.wants_stop(),
                                                                    .ends_epoch = ends != EndsEpoch::no,
                                                                    .skips_epoch = ends == EndsEpoch::by_skipping},
                                                                   is_last);
  ended_ = all.ends_epoch;
  skipped_ = all.skips_epoch;
  if (!is_last && !ended_) return;
  window_batches_ = micro_batches_ = 0;
  loss_sum_ = 0.0;
  bounds_.agree(all.wants_stop);
  const double mean_loss = all.loss_sum / static_cast<double>(all.micro_batches);
  stepped_ = all.micro_batches > 0 && steps_.step(0, all.micro_batches, mean_loss);
  if (stepped_) steps_.move_schedules("step", OptimizerSteps::Kind::plain);
}

void TrainEpochLoop::count_step() {
  if (!stepped_) return;
  log_step_metrics();
  ++context_.state.batches_that_stepped;
}

void TrainEpochLoop::log_step_metrics() {
  const int64_t step = context_.state.batches_that_stepped;
  if (!context_.is_logged(step) && !bounds_.should_stop()) return;
  context_.send(context_.metrics.take_step_metrics(), step);
}

// A validation that is due within an accumulation window runs at its end. Earlier it would measure weights that have
// not changed, and another rank may end the window by skipping the epoch.
void TrainEpochLoop::look_at_schedule() {
  validation_is_due_ = validation_is_due_ || schedule_.due(context_.state, progress_.total_batches);
}

bool TrainEpochLoop::validation_is_due() {
  bool due = std::exchange(validation_is_due_, false);
  if (schedule_.is_by_clock()) due = any_rank(context_.ranks, due);
  return due || (ends_here() && schedule_.validates_in(context_.state.epoch));
}

void TrainEpochLoop::validate_after_batch(bool is_due) {
  if (is_due && !validation_.empty() && !validate()) return;
  if (stepped_ && context_.hooks.module().automatic_optimization) {
    steps_.move_schedules("step", OptimizerSteps::Kind::plateau);
  }
}

// Returns false if a signal stopped the validation, which then stays due.
bool TrainEpochLoop::validate() {
  progress_.interrupted_validation = {.after_step = stepped_, .is_last_batch = context_.state.is_last_batch};
  if (bounds_.signal() != 0) return false;
  if (context_.hooks.module().automatic_optimization) {
    context_.hooks.located("on_validation_model_zero_grad", HookCaller::WhatRuns::epoch,
                           [&] { context_.hooks.module().on_validation_model_zero_grad(); });
  }
  SignalPoll signal_came(bounds_, context_.ranks);
  if (!validation_.run_unless(std::ref(signal_came))) return false;
  progress_.interrupted_validation.reset();
  context_.state.has_validated = true;
  schedule_.restart_clock();
  bounds_.agree();
  return true;
}

}  // namespace fulgur
