#include "fulgur/loops/evaluation_loop.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "fulgur/base/first_error.h"
#include "fulgur/base/seed.h"
#include "fulgur/base/trace.h"
#include "fulgur/core/scoped_modes.h"
#include "fulgur/loops/limited_batches.h"

namespace fulgur {
namespace {

// Keeps the state of the run for the report of a failure if an exception ends the lifetime of the object.
class ScopedFailedState {
 public:
  explicit ScopedFailedState(LoopContext& context) : context_(context), num_exceptions_(std::uncaught_exceptions()) {}
  ~ScopedFailedState() {
    const bool has_failed = std::uncaught_exceptions() > num_exceptions_;
    if (has_failed && !context_.failed_state) context_.failed_state = context_.state;
  }
  ScopedFailedState(const ScopedFailedState&) = delete;
  ScopedFailedState& operator=(const ScopedFailedState&) = delete;

 private:
  LoopContext& context_;
  const int num_exceptions_;
};

// Restores the stage of the run, with its batch and loader indices.
class ScopedStage {
 public:
  explicit ScopedStage(LoopContext& context) : context_(context), before_(context.state) {}
  ~ScopedStage() {
    RunState& state = context_.state;
    state.stage = before_.stage;
    state.batch_idx = before_.batch_idx;
    state.num_batches = before_.num_batches;
    state.dataloader_idx = before_.dataloader_idx;
    context_.metrics.enter(state.stage, context_.metrics.hook());
  }
  ScopedStage(const ScopedStage&) = delete;
  ScopedStage& operator=(const ScopedStage&) = delete;

 private:
  LoopContext& context_;
  const RunState before_;
};

// Marks the run as sanity checking for the lifetime of the object.
class ScopedSanityCheck {
 public:
  explicit ScopedSanityCheck(RunState& state) : state_(state) { state.sanity_checking = true; }
  ~ScopedSanityCheck() { state_.sanity_checking = false; }
  ScopedSanityCheck(const ScopedSanityCheck&) = delete;
  ScopedSanityCheck& operator=(const ScopedSanityCheck&) = delete;

 private:
  RunState& state_;
};

// The state that a pass changes, to be restored if the pass does not count.
class BeforePass {
 public:
  BeforePass(LoopContext& context, int64_t& num_batches_run)
      : context_(context),
        num_batches_run_(num_batches_run),
        metrics_(context.metrics.state_of_ended_epochs()),
        num_batches_(num_batches_run) {}
  void bring_back() const {
    random_.restore();
    context_.metrics.load_state(metrics_);
    num_batches_run_ = num_batches_;
  }

 private:
  LoopContext& context_;
  int64_t& num_batches_run_;
  const RandomState random_ = RandomState::now();
  const State metrics_;
  const int64_t num_batches_;
};

// A hook that changes the mode of the model.
struct ModeHook {
  std::string_view name;
  void (Module::*member)();
};

// The hooks in which validation and test differ.
struct EvaluationHooks {
  using StageHook = hooks::SharedHook<void (Callback::*)(TrainerControl&), void (Module::*)()>;
  using BatchHook = hooks::SharedHook<void (Callback::*)(TrainerControl&, const Batch&, int64_t),
                                      void (Module::*)(const Batch&, int64_t)>;
  ModeHook model_eval;
  const StageHook& start;
  const StageHook& epoch_start;
  const BatchHook& batch_start;
  const Hook& step;
  void (Module::*step_member)(const Batch&, int64_t);
  const BatchHook& batch_end;
  const StageHook& epoch_end;
  const StageHook& end;
  ModeHook model_train;
};

constexpr EvaluationHooks kValidation{.model_eval = {"on_validation_model_eval", &Module::on_validation_model_eval},
                                      .start = hooks::on_validation_start,
                                      .epoch_start = hooks::on_validation_epoch_start,
                                      .batch_start = hooks::on_validation_batch_start,
                                      .step = hooks::validation_step,
                                      .step_member = &Module::validation_step,
                                      .batch_end = hooks::on_validation_batch_end,
                                      .epoch_end = hooks::on_validation_epoch_end,
                                      .end = hooks::on_validation_end,
                                      .model_train = {"on_validation_model_train", &Module::on_validation_model_train}};

constexpr EvaluationHooks kTest{.model_eval = {"on_test_model_eval", &Module::on_test_model_eval},
                                .start = hooks::on_test_start,
                                .epoch_start = hooks::on_test_epoch_start,
                                .batch_start = hooks::on_test_batch_start,
                                .step = hooks::test_step,
                                .step_member = &Module::test_step,
                                .batch_end = hooks::on_test_batch_end,
                                .epoch_end = hooks::on_test_epoch_end,
                                .end = hooks::on_test_end,
                                .model_train = {"on_test_model_train", &Module::on_test_model_train}};

// Runs `body` without gradients, between the hooks that change the mode of the model.
template <class Body>
void in_eval_mode(LoopContext& context, Stage stage, const ModeHook& model_eval, const ModeHook& model_train,
                  const Body& body) {
  Module& module = context.hooks.module();
  const ScopedStage stage_restored(context);
  context.state.stage = stage;
  const ScopedFailedState keeps_state(context);
  const auto call = [&](const ModeHook& hook) {
    context.hooks.located(hook.name, HookCaller::WhatRuns::epoch, [&] { (module.*hook.member)(); });
  };
  {
    const c10::NoGradGuard no_grad;
    const ScopedModes modes(module);
    call(model_eval);
    body();
  }
  call(model_train);
}

constexpr std::string_view name_of_loader(Stage stage) {
  return stage == Stage::validate ? "the val loader" : stage == Stage::test ? "the test loader" : "the predict loader";
}

// Calls `body(batch)` for every batch of every loader. Calls `ends()` before each batch; if it returns true, stops and
// returns false.
template <class Ends, class Body>
bool for_each_batch(LoopContext& context, const EvaluationLoaders& loaders, const Ends& ends, const Body& body) {
  RunState& state = context.state;
  for (size_t i = 0; i < loaders.size(); ++i) {
    state.dataloader_idx = static_cast<int64_t>(i);
    state.batch_idx = 0;
    state.num_batches = loaders.num_batches(i);
    context.metrics.set_dataloader(loaders.size() > 1 ? std::optional(state.dataloader_idx) : std::nullopt);
    const auto read = [&](const auto& fetch) {
      const trace::Span span("wait for data");
      return context.hooks.located(name_of_loader(state.stage), HookCaller::WhatRuns::batch, fetch);
    };
    LimitedBatches batches =
        read([&] { return LimitedBatches(loaders.loader(i), /*epoch=*/0, loaders.num_batches(i)); });
    const bool may_be_empty = context.ranks.world_size() > 1 || loaders.num_batches(i) == 0;
    if (batches.empty() && !may_be_empty) {
      throw SetupError(fmt::format("{} yields no batch; can it be read only once?", name_of_loader(state.stage)));
    }
    while (!batches.empty()) {
      if (ends()) return false;
      const RunningBatch running(context, context.to_device(read([&] { return batches.take(); })));
      body(*running);
      ++state.batch_idx;
    }
  }
  context.metrics.set_dataloader(std::nullopt);
  return true;
}

}  // namespace

EvaluationLoaders::EvaluationLoaders(LoaderList loaders, const BatchLimit& limit, std::string_view option)
    : loaders_(std::move(loaders)) {
  for (const auto& loader : loaders_) limits_.push_back(limit.of(loader->num_batches(), option));
}

bool EvaluationLoaders::empty() const {
  return std::ranges::all_of(limits_, [](const auto& limit) { return limit == 0; });
}

EvaluationLoaders EvaluationLoaders::at_most(int64_t num_batches) const {
  EvaluationLoaders fewer = *this;
  for (auto& limit : fewer.limits_) limit = std::min(limit.value_or(num_batches), num_batches);
  return fewer;
}

Metrics EvaluationLoop::run() { return *run(loaders_, nullptr); }

bool EvaluationLoop::run_unless(const std::function<bool()>& ends) {
  const BeforePass before(context_, num_batches_run_);
  const HookCaller::Callbacks& callbacks = context_.hooks.callbacks();
  std::vector<State> states;
  for (const auto& callback : callbacks) states.push_back(callback->state());
  const auto bring_back = [&] {
    before.bring_back();
    for (size_t i = 0; i < states.size(); ++i) {
      if (!states[i].empty()) callbacks[i]->load_state(states[i]);
    }
  };
  FirstError error;
  bool is_whole = false;
  error.run([&] { is_whole = run(loaders_, ends).has_value(); });
  if (!is_whole) error.run(bring_back);
  error.rethrow();
  return is_whole;
}

// Returns nullopt if `ends` stopped the pass.
std::optional<Metrics> EvaluationLoop::run(const EvaluationLoaders& loaders, const std::function<bool()>& ends) {
  const EvaluationHooks& phase = stage_ == Stage::test ? kTest : kValidation;
  HookCaller& hooks = context_.hooks;
  MetricLog& metric_log = context_.metrics;
  const RunState& state = context_.state;
  const std::vector<double> asked = ends ? batches_of_every_rank(loaders) : std::vector<double>(loaders.size(), 0.0);
  const auto ends_here = [&] {
    return static_cast<double>(state.batch_idx) < asked[static_cast<size_t>(state.dataloader_idx)] && ends();
  };
  std::optional<Metrics> metrics;
  const bool was_shown = context_.strategy.show_evaluated(true);
  in_eval_mode(context_, stage_, phase.model_eval, phase.model_train, [&] {
    metric_log.begin_epoch(stage_);
    hooks(phase.start);
    hooks(phase.epoch_start);
    const bool is_whole = for_each_batch(context_, loaders, ends_here, [&](const Batch& batch) {
      const int64_t batch_idx = state.batch_idx;
      hooks(phase.batch_start, batch, batch_idx);
      hooks.within(phase.step, [&] {
        const ScopedPrecision precision = context_.precision_scope();
        (hooks.module().*phase.step_member)(batch, batch_idx);
      });
      hooks(phase.batch_end, batch, batch_idx);
      if (context_.is_logged(num_batches_run_++)) send(metric_log.take_step_metrics(), num_batches_run_ - 1);
      metric_log.begin_step(stage_);
    });
    if (!is_whole) return leave();
    Metrics of_steps = metric_log.end_epoch(stage_, &context_.ranks);
    hooks(phase.epoch_end);
    Metrics for_loggers = metric_log.end_epoch(stage_, &context_.ranks);
    for_loggers.merge(of_steps);  // the later value of a name stays, as in callback_metrics()
    metrics = metric_log.epoch_metrics();
    send(for_loggers, state.last_step());
    hooks(phase.end);
  });
  if (!was_shown) context_.strategy.show_evaluated(false);  // not after an exception: other ranks would not take part
  return metrics;
}

// Runs the end hooks of a stopped pass, so that they can undo what the start hooks did.
void EvaluationLoop::leave() {
  const EvaluationHooks& phase = stage_ == Stage::test ? kTest : kValidation;
  HookCaller& hooks = context_.hooks;
  FirstError epoch_end, end;
  const auto call = [&](FirstError& error, const EvaluationHooks::StageHook& hook) {
    for (const auto& callback : hooks.callbacks()) {
      const auto is_this = [&](const Callback& other) { return &other == callback.get(); };
      error.run([&] { hooks.callbacks_where(is_this, hook, hook.callback); });
    }
    error.run([&] { hooks.within(hook, [&] { (hooks.module().*hook.module)(); }); });
  };
  call(epoch_end, phase.epoch_end);
  epoch_end.run([&] { context_.metrics.end_epoch(stage_); });  // resets metrics that were logged by reference
  context_.metrics.begin_epoch(stage_);                        // values of a part of the data are no epoch's metrics
  call(end, phase.end);
  const bool alone = context_.ranks.world_size() == 1;
  alone ? epoch_end.warn("at the end of a validation that a signal cut short") : epoch_end.rethrow();
  end.rethrow();
}

std::vector<double> EvaluationLoop::batches_of_every_rank(const EvaluationLoaders& loaders) const {
  constexpr double kAny = std::numeric_limits<double>::max();
  const double unknown = context_.ranks.world_size() == 1 ? kAny : 0;
  std::vector<double> counts;
  for (size_t i = 0; i < loaders.size(); ++i) {
    const auto count = loaders.num_batches(i);
    const bool is_known = count && loaders.loader(i).num_batches();  // a limit alone may exceed the length
    counts.push_back(is_known ? static_cast<double>(*count) : unknown);
  }
  context_.ranks.all_reduce(counts, Reduction::min);
  return counts;
}

void EvaluationLoop::send(const Metrics& metrics, int64_t step) {
  if (!context_.state.sanity_checking) context_.send(metrics, step);
}

void EvaluationLoop::run_sanity_check(int64_t num_steps) {
  const EvaluationLoaders loaders = num_steps < 0 ? loaders_ : loaders_.at_most(num_steps);
  if (loaders.empty()) return;
  HookCaller& hooks = context_.hooks;
  const BeforePass before(context_, num_batches_run_);
  {
    const ScopedSanityCheck sanity_checking(context_.state);
    const ScopedFailedState keeps_state(context_);
    hooks.callbacks_only(hooks::on_sanity_check_start, &Callback::on_sanity_check_start);
    run(loaders, nullptr);
    hooks.callbacks_only(hooks::on_sanity_check_end, &Callback::on_sanity_check_end);
  }
  before.bring_back();
}

std::vector<Batch> run_prediction(LoopContext& context, const EvaluationLoaders& loaders) {
  HookCaller& hooks = context.hooks;
  std::vector<Batch> predictions;
  if (loaders.empty()) return predictions;
  const bool keeps = std::ranges::none_of(hooks.callbacks(), [](const auto& c) { return c->takes_predictions(); });
  constexpr ModeHook kModelEval{"on_predict_model_eval", &Module::on_predict_model_eval};
  constexpr ModeHook kModelTrain{"on_predict_model_train", &Module::on_predict_model_train};
  in_eval_mode(context, Stage::predict, kModelEval, kModelTrain, [&] {
    hooks(hooks::on_predict_start);
    hooks(hooks::on_predict_epoch_start);
    const auto never = [] { return false; };
    for_each_batch(context, loaders, never, [&](const Batch& batch) {
      const int64_t batch_idx = context.state.batch_idx;
      hooks(hooks::on_predict_batch_start, batch, batch_idx);
      const Batch prediction = hooks.within(hooks::predict_step, [&] {
        const ScopedPrecision precision = context.precision_scope();
        return hooks.module().predict_step(batch, batch_idx);
      });
      hooks(hooks::on_predict_batch_end, prediction, batch, batch_idx);
      if (keeps) predictions.push_back(prediction.to(c10::kCPU));
    });
    hooks(hooks::on_predict_epoch_end);
    hooks(hooks::on_predict_end);
  });
  return predictions;
}

}  // namespace fulgur
