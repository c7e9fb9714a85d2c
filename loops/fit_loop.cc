#include "fulgur/loops/fit_loop.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/seed.h"
#include "fulgur/loops/repeat_first_epoch.h"

namespace fulgur {
namespace {

// Submodules in eval mode stay so, because the user may have intended it; the warning is for a user who forgot train().
void warn_of_frozen_modes(const Module& module) {
  const auto modules = module.modules();
  const auto num_eval = std::ranges::count_if(modules, [](const auto& part) { return !part->is_training(); });
  if (num_eval > 0) {
    log_warning(
        "{} of the {} modules in {} stay in eval mode during training; call train() before fit if that is not intended",
        num_eval, modules.size(), module.name());
  }
}

constexpr int64_t kMostCounted = int64_t{1} << 53;

int64_t count_of(const State& state, std::string_view name) {
  const auto count = state.get<int64_t>(name);
  if (count < 0 || count > kMostCounted) {
    throw CheckpointError(c10::str("'", name, "' is ", count, ", which no run counts"));
  }
  return count;
}

// a + b * c, or the largest number if the result is larger.
int64_t saturated(int64_t a, int64_t b, int64_t c) {
  int64_t product = 0, sum = 0;
  const bool overflows = __builtin_mul_overflow(b, c, &product) || __builtin_add_overflow(a, product, &sum);
  return overflows ? std::numeric_limits<int64_t>::max() : sum;
}

FitBounds::Clock::duration elapsed_of(const State& state) {
  constexpr double kMost = 1e9;  // s; more than 30 years
  const auto elapsed_s = state.get<double>("elapsed_s");
  if (!(elapsed_s >= 0 && elapsed_s <= kMost)) {
    throw CheckpointError(c10::str("'elapsed_s' is ", elapsed_s, ", which no run has taken"));
  }
  return std::chrono::duration_cast<FitBounds::Clock::duration>(std::chrono::duration<double>(elapsed_s));
}

// What cuts an epoch into the batches of a rank.
struct EpochGrid {
  int64_t world_size;
  int64_t batch_size;
  bool operator==(const EpochGrid&) const = default;
  int64_t samples() const { return world_size * batch_size; }  // in a batch of every rank
};

struct Grids {
  EpochGrid before, now;
};

// If only one of them knows the samples in a batch, they are taken for equal.
Grids grids_of(const State& state, int64_t world_size, const Ranks& ranks, const Loader& loader) {
  const bool tells_batch_size = state.find<int64_t>("batch_size") != nullptr;
  const std::optional<int64_t> now = loader.batch_size();
  const int64_t before = tells_batch_size ? count_of(state, "batch_size") : now.value_or(1);
  return {.before = {.world_size = world_size, .batch_size = before},
          .now = {.world_size = ranks.world_size(), .batch_size = now.value_or(before)}};
}

// Whether the run that saved `state` had the same option accumulate_grad_batches, as far as it tells.
bool accumulates_as(const State& state, const LoopPlan& plan) {
  const auto* planned = state.find<int64_t>("planned_accumulation");  // null: written by an earlier version
  return planned == nullptr || *planned == plan.accumulate_grad_batches;
}

double max_time_s(const LoopPlan& plan) { return plan.max_time ? plan.max_time->seconds().count() : -1.0; }

// What a run on the grid `before` has consumed of the epoch, in batches of the grid `now`. If the batches do not divide
// evenly, the loader's position is exact; for a loader without a position, the rest of a batch of all ranks is skipped.
LimitedBatches::Consumed consumed_in(const State& state, const EpochGrid& before, const EpochGrid& now) {
  const int64_t batches = count_of(state, "batches_of_epoch");
  const bool* is_recut = state.find<bool>("epoch_is_recut");  // null: written by an earlier version
  const State position = state.child("position");
  if (batches == 0 && position.empty()) return {};
  if (before == now) {
    return {.batches = batches, .position = position, .is_recut = is_recut != nullptr && *is_recut};
  }
  const int64_t rounding = position.empty() ? now.samples() - 1 : 0;
  return {.batches = (batches * before.samples() + rounding) / now.samples(), .position = position, .is_recut = true};
}

}  // namespace

FitLoop::FitLoop(LoopContext& context, LoaderSources sources)
    : context_(context), sources_(std::move(sources)), validation_(context, Stage::validate), schedule_(context.plan) {
  load();
  write_plan();
}

// The counts and clocks of validation continue when the loaders are recreated.
void FitLoop::load() {
  const LoopPlan& plan = context_.plan;
  const auto name_of = [&](std::string_view limit) { return plan.overfits ? "overfit_batches" : limit; };
  train_ = sources_.train();
  const LoaderList val = sources_.val();
  const bool is_shared = std::ranges::count(val, train_) > 0;
  if (plan.overfits) train_ = repeat_first_epoch(std::move(train_));
  num_train_batches_ =
      shortest_of_ranks(plan.limit_train_batches.of(train_->num_batches(), name_of("limit_train_batches")));
  lockstep_ = context_.ranks.world_size() > 1 && any_rank(context_.ranks, !train_->num_batches());
  validation_.set_loaders({val, plan.limit_val_batches, name_of("limit_val_batches")});
  schedule_.set_num_batches(num_train_batches_);
  if (is_shared && !schedule_.only_at_epoch_end()) {
    throw SetupError(
        "the train loader is a val loader too, but val_check_interval validates within the epoch, and a loader can be "
        "read by one loop at a time; make two of the same dataset");
  }
  context_.state.num_batches = num_train_batches_;
  context_.state.batch_size = train_->batch_size();
  context_.state.has_validation = !validation_.empty();
  if (!plan.log_every_n_steps) context_.log_every_n_steps = log_every_n_steps();
}

// Gives each epoch, and a run that max_steps ends, a row of a step, if no step is skipped and no callback accumulates.
int64_t FitLoop::log_every_n_steps() const {
  const LoopPlan& plan = context_.plan;
  int64_t every = kLogEveryNSteps;
  if (num_train_batches_) every = std::min(every, plan.steps_in(*num_train_batches_));
  if (plan.max_steps >= 0) every = std::min(every, plan.max_steps);
  return std::max<int64_t>(every, 1);
}

// All ranks train on the same number of batches. If one rank does not know the length, it is unknown on all.
std::optional<int64_t> FitLoop::shortest_of_ranks(std::optional<int64_t> num_batches) {
  constexpr double kUnknown = -1;
  double least = num_batches ? static_cast<double>(*num_batches) : kUnknown, most = least;
  context_.ranks.all_reduce({&least, 1}, Reduction::min);
  context_.ranks.all_reduce({&most, 1}, Reduction::max);
  if (least == kUnknown) return std::nullopt;
  if (least < most && context_.ranks.rank() == 0) {
    log_warning(
        "the train loaders of the ranks have from {} to {} batches; every epoch ends after {}, and the rest is not "
        "trained on",
        least, most, least);
  }
  return static_cast<int64_t>(least);
}

// Fills in what RunState says about the whole run.
void FitLoop::write_plan() {
  context_.state.stage = Stage::train;
  context_.state.max_epochs = context_.plan.max_epochs;
  context_.state.is_dry_run = context_.plan.dry_run_of.has_value();
  estimate_steps();
}

// The steps in the rest of an epoch and in all later ones; nullopt: nothing bounds the epochs, or their length is not
// known.
std::optional<int64_t> FitLoop::steps_left(const Position& from) {
  const LoopPlan& plan = context_.plan;
  const auto& whole = plan.dry_run_of;
  const auto num_batches =
      whole ? shortest_of_ranks(whole->limit_train_batches.estimate_of(train_->num_batches())) : num_train_batches_;
  const int64_t max_epochs = whole ? whole->max_epochs : plan.max_epochs;
  if (!num_batches || max_epochs < 0) return std::nullopt;
  if (from.epoch >= max_epochs) return 0;
  const int64_t in_this_epoch = plan.steps_in(std::max<int64_t>(*num_batches - from.batches_done, 0));
  return saturated(in_this_epoch, max_epochs - from.epoch - 1, plan.steps_in(*num_batches));
}

// Counts all epochs from the start, so that a run that resumes has the estimate of the whole run, although both may
// have skipped steps.
void FitLoop::estimate_steps() {
  const LoopPlan& plan = context_.plan;
  const int64_t max_steps = plan.dry_run_of ? plan.dry_run_of->max_steps : plan.max_steps;
  std::optional<int64_t> steps = steps_left({});
  if (steps) steps = std::max<int64_t>(saturated(*steps, extra_steps_, 1), 0);
  if (max_steps >= 0) steps = std::min(steps.value_or(max_steps), max_steps);
  context_.state.estimated_stepping_batches = steps;
}

void FitLoop::estimate_steps_from(const State& state, int64_t world_size) {
  const auto* extra_steps = state.find<int64_t>("extra_steps");
  extra_steps_ = extra_steps == nullptr ? 0 : std::clamp(*extra_steps, -kMostCounted, kMostCounted);
  const auto [before, now] = grids_of(state, world_size, context_.ranks, *train_);
  if (before != now || !accumulates_as(state, context_.plan)) {
    const Position from{.epoch = count_of(state, "epoch"),
                        .global_step = count_of(state, "global_step"),
                        .batches_done = consumed_in(state, before, now).batches};
    const auto whole = steps_left({}), left = steps_left(from);
    if (whole && left) extra_steps_ = saturated(*left, from.global_step, 1) - *whole;
  }
  estimate_steps();
}

void FitLoop::run(OptimizerSteps& steps) {
  HookCaller& hooks = context_.hooks;
  hooks(hooks::on_fit_start);
  send_hyper_parameters();
  const bool nothing_to_do = num_train_batches_ == 0 || context_.state.max_epochs == 0 || context_.plan.max_steps == 0;
  if (!nothing_to_do) train(steps);
  hooks(hooks::on_fit_end);
}

void FitLoop::warn_of_nothing_left() const {
  if (context_.ranks.rank() > 0) return;
  const RunState& state = context_.state;
  log_warning(
      "nothing is left to train: the checkpoint has completed {} epochs and {} steps; raise max_epochs or max_steps to "
      "train on",
      state.epoch, state.global_step);
}

void FitLoop::send_hyper_parameters() {
  HookCaller& hooks = context_.hooks;
  const State& values = hooks.module().hyper_parameters();
  if (values.empty() || context_.ranks.rank() > 0) return;
  const Record record{.name = {}, .content = HyperParameters{values}};
  hooks.callbacks_only(hooks::on_record, &Callback::on_record, record, context_.state.last_step());
}

void FitLoop::train(OptimizerSteps& steps) {
  HookCaller& hooks = context_.hooks;
  if (!resume_ && !validation_.empty() && context_.plan.num_sanity_val_steps != 0) {
    validation_.run_sanity_check(context_.plan.num_sanity_val_steps);
  }
  warn_of_frozen_modes(hooks.module());
  context_.metrics.begin_epoch(Stage::train);
  hooks(hooks::on_train_start);
  schedule_.restart_clock();
  FitBounds& bounds =
      bounds_.emplace(context_.plan, context_.state, context_.stop, context_.ranks, context_.signals, start_);
  if (restores_stop_) bounds.restore_stop();
  bounds.agree();
  while (true) {
    if (bounds.signal() != 0) context_.events.interrupt(bounds.signal());
    const bool validates_first = resume_ && progress_.interrupted_validation && !bounds.max_epochs_reached();
    if (bounds.done() && !validates_first) break;
    context_.saver.set_in_training(true);
    run_epoch(steps, bounds);
  }
  context_.saver.set_in_training(false);
  if (resume_) {
    restore();
    if (bounds.max_epochs_reached() || bounds.max_steps_reached()) warn_of_nothing_left();
  }
  context_.strategy.drain();
  hooks(hooks::on_train_end);
}

void FitLoop::run_epoch(OptimizerSteps& steps, FitBounds& bounds) {
  RunState& state = context_.state;
  const int64_t reload_every = context_.plan.reload_dataloaders_every_n_epochs;
  if (!resume_ && reload_every > 0 && state.epoch > 0 && state.epoch % reload_every == 0) load();
  const int64_t steps_before = state.global_step;
  const bool in_middle = resume_ && resume_->is_in_middle;
  if (resume_ && !in_middle) restore();
  context_.hooks(hooks::on_train_epoch_start);
  TrainEpochLoop(context_, steps, bounds, validation_, schedule_, progress_)
      .run(*train_, num_train_batches_, lockstep_, in_middle ? &resume_->epoch : nullptr);
  resume_.reset();
  if (!context_.state.epoch_is_complete) metrics_of_cut_epoch_ = context_.metrics.state();
  if (state.global_step == steps_before && !in_middle && !warn_idle_.has_warned() && !bounds.done()) {
    warn_idle_("epoch {} ended without an optimizer step", state.epoch);
  }
  end_epoch(steps);
  context_.events.roll_back_if_asked();
  bounds.agree();
  ++state.epoch;
  if (context_.state.epoch_is_complete) {
    progress_.epoch = state.epoch;
    progress_.batches_done = 0;
    progress_.position = {};
    progress_.is_recut = progress_.had_last = false;
  }
  context_.saver.at_boundary();
}

State FitLoop::state() const {
  const RunState& run = context_.state;
  const std::chrono::duration<double> elapsed = FitBounds::Clock::now() - start_;
  State state;
  state.set("epoch", progress_.epoch);
  state.set("batches_of_epoch", progress_.batches_done);
  if (const auto batch_size = train_->batch_size()) state.set("batch_size", *batch_size);
  state.set("epoch_is_recut", progress_.is_recut);
  state.set("epoch_had_last_batch", progress_.had_last);
  state.set_child("position", progress_.position);
  state.set("total_batches", progress_.total_batches);
  state.set("global_step", run.global_step);
  state.set("batches_that_stepped", run.batches_that_stepped);
  state.set("validation_batches", validation_.num_batches_run());
  state.set("elapsed_s", elapsed.count());
  if (progress_.interrupted_validation) {
    state.set("validation_due/after_step", progress_.interrupted_validation->after_step);
    state.set("validation_due/is_last_batch", progress_.interrupted_validation->is_last_batch);
  }
  state.set("planned_accumulation", context_.plan.accumulate_grad_batches);
  if (context_.accumulate_grad_batches != context_.plan.accumulate_grad_batches) {
    state.set("accumulate_grad_batches", context_.accumulate_grad_batches);
  }
  if (progress_.accumulation > 0) state.set("accumulation_of_epoch", progress_.accumulation);
  if (extra_steps_ != 0) state.set("extra_steps", extra_steps_);
  state.set_child("stop", stop_state());
  state.set_child("train_loader", train_->state());
  return state;
}

// The bounds that a stop has waited for; empty if none has.
State FitLoop::stop_state() const {
  State state;
  const bool has_waited = bounds_ ? bounds_->stop_has_waited() : restores_stop_;
  if (!has_waited) return state;
  state.set("min_epochs", context_.plan.min_epochs);
  state.set("min_steps", context_.plan.min_steps);
  state.set("max_time_s", max_time_s(context_.plan));
  return state;
}

// A rank goes to its own position, or to the position of rank 0 if the number of ranks has changed.
void FitLoop::load_state(const State& state, int64_t world_size, const State& metrics, const State& of_rank) {
  RunState& run = context_.state;
  run.epoch = progress_.epoch = count_of(state, "epoch");
  if (run.max_epochs >= 0 && run.epoch > run.max_epochs) {
    throw CheckpointError(c10::str("the checkpoint has completed ", run.epoch, " epochs, but max_epochs = ",
                                   run.max_epochs, "; set max_epochs to the total number of epochs"));
  }
  run.global_step = count_of(state, "global_step");
  run.batches_that_stepped = count_of(state, "batches_that_stepped");
  progress_.total_batches = count_of(state, "total_batches");
  if (state.find<int64_t>("validation_batches") != nullptr) {
    validation_.set_num_batches_run(count_of(state, "validation_batches"));
    run.has_validated = validation_.num_batches_run() > 0;
  }
  if (const State due = state.child("validation_due"); !due.empty()) {
    progress_.interrupted_validation = {.after_step = due.get<bool>("after_step"),
                                        .is_last_batch = due.get<bool>("is_last_batch")};
  }
  start_ -= elapsed_of(state);
  load_accumulation(state);
  train_->load_state(state.child("train_loader"));
  const auto [before, now] = grids_of(state, world_size, context_.ranks, *train_);
  LimitedBatches::Consumed consumed = consumed_in(state, before, now);
  if (const State own = of_rank.child("position"); !own.empty()) consumed.position = own;
  progress_.batches_done = consumed.batches;
  progress_.position = consumed.position;
  progress_.is_recut = consumed.is_recut;
  const bool* had_last = state.find<bool>("epoch_had_last_batch");  // null: written by an earlier version
  progress_.had_last = had_last == nullptr || *had_last;
  resume_ = Resume{.epoch = {.consumed = consumed, .had_last = progress_.had_last, .accumulation = {}, .restore = {}},
                   .metrics = metrics,
                   .of_rank = of_rank,
                   .is_in_middle = consumed.batches > 0 || !consumed.position.empty()};
  resume_->epoch.restore = [this] { restore(); };
  const auto* of_epoch = state.find<int64_t>("accumulation_of_epoch");
  if (of_epoch != nullptr && *of_epoch > 0 && accumulates_as(state, context_.plan)) {
    resume_->epoch.accumulation = *of_epoch;
  }
}

// What a callback has set lasts until a callback sets another value, unless the options have changed.
void FitLoop::load_accumulation(const State& state) {
  const auto* accumulation = state.find<int64_t>("accumulate_grad_batches");
  if (accumulation == nullptr) return;
  if (*accumulation < 1) throw CheckpointError(c10::str("'accumulate_grad_batches' is ", *accumulation));
  if (!accumulates_as(state, context_.plan)) return;
  context_.accumulate_grad_batches = *accumulation;
  if (context_.ranks.rank() > 0) return;
  log_info("accumulate_grad_batches begins with the {} of the checkpoint, which a callback had set, instead of {}",
           *accumulation, context_.plan.accumulate_grad_batches);
}

void FitLoop::load_stop(const State& state) {
  const auto* min_epochs = state.find<int64_t>("stop/min_epochs");  // null: no stop has waited
  if (min_epochs == nullptr) return;
  const LoopPlan& plan = context_.plan;
  restores_stop_ = *min_epochs == plan.min_epochs && state.get<int64_t>("stop/min_steps") == plan.min_steps &&
                   state.get<double>("stop/max_time_s") == max_time_s(plan);
  if (!restores_stop_ || context_.ranks.rank() > 0) return;
  log_info(
      "a stop was requested before the checkpoint was saved: fit ends once min_epochs = {} and min_steps = {} are "
      "reached",
      plan.min_epochs, plan.min_steps);
}

State FitLoop::rank_state() const {
  const bool is_waiting = resume_ && !resume_->is_restored;
  if (is_waiting && !resume_->of_rank.empty()) return resume_->of_rank;
  State state;
  state.set_child("position", progress_.position);
  state.set_child("random", RandomState::now().state());
  if (is_waiting) {
    state.set_child("metrics", resume_->metrics);
  } else {
    state.set_child("metrics", metrics_to_save());
  }
  return state;
}

// After the last batch of an epoch or a run, a run that resumes cannot compute the values of Metrics, which nobody logs
// again.
State FitLoop::metrics_to_save() const {
  if (metrics_of_cut_epoch_) return *metrics_of_cut_epoch_;
  const bool ends = bounds_ && bounds_->max_steps_reached();
  const bool has_last = any_rank(context_.ranks, progress_.had_last || ends);
  return has_last ? context_.metrics.state_after_last_batch(context_.ranks) : context_.metrics.state();
}

void FitLoop::restore() {
  resume_->is_restored = true;
  const bool same_ranks = !resume_->of_rank.empty();
  context_.metrics.load_state(same_ranks ? resume_->of_rank.child("metrics") : resume_->metrics);
  if (!same_ranks) return;
  RandomState(resume_->of_rank.child("random")).restore();
}

// ModelCheckpoint runs after the Module here, so that it sees what on_train_epoch_end logged.
void FitLoop::end_epoch(OptimizerSteps& steps) {
  HookCaller& hooks = context_.hooks;
  const auto runs_last = [](const Callback& callback) { return callback.runs_last(); };
  Metrics of_steps = context_.metrics.end_epoch(Stage::train, &context_.ranks);
  hooks.callbacks_where(std::not_fn(runs_last), hooks::on_train_epoch_end, &Callback::on_train_epoch_end);
  hooks.within(hooks::on_train_epoch_end, [&] { hooks.module().on_train_epoch_end(); });
  Metrics metrics = context_.metrics.end_epoch(Stage::train, &context_.ranks);
  metrics.merge(of_steps);  // the later value of a name stays, as in callback_metrics()
  static constexpr Hook kReduced{"on_train_epoch_end", LogScope::forbidden};
  hooks.callbacks_where(runs_last, kReduced, &Callback::on_train_epoch_end);
  if (hooks.module().automatic_optimization && context_.state.epoch_is_complete)
    steps.move_schedules("epoch", OptimizerSteps::Kind::plateau);
  context_.send(metrics, context_.state.last_step());
}

}  // namespace fulgur
