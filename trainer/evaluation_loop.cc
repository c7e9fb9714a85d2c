#include "trainer/evaluation_loop.h"

#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

namespace fulgur {
namespace {

// Eval mode for a scope. Modes are restored parents first: train() reaches down to the children.
class EvalMode {
 public:
  explicit EvalMode(Module& module) {
    for (const auto& part : module.modules()) modes_.emplace_back(part, part->is_training());
    module.eval();
  }
  ~EvalMode() {
    for (const auto& [part, was_training] : modes_) part->train(was_training);
  }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

// The stage, batch index and length that RunState shows while another loop runs inside.
class StageScope {
 public:
  StageScope(RunState& state, Stage stage, std::optional<int64_t> num_batches) : state_(state), before_(state) {
    state.stage = stage;
    state.batch_idx = 0;
    state.num_batches = num_batches;
  }
  ~StageScope() {
    state_.stage = before_.stage;
    state_.batch_idx = before_.batch_idx;
    state_.num_batches = before_.num_batches;
  }
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;

 private:
  RunState& state_;
  RunState before_;
};

using CallbackHook = void (Callback::*)(TrainerControl&);
using CallbackBatchHook = void (Callback::*)(TrainerControl&, const Batch&, int64_t);
using ModuleHook = void (Module::*)();
using ModuleBatchHook = void (Module::*)(const Batch&, int64_t);

template <class CallbackMember, class ModuleMember>
struct Hook {
  CallbackMember callback;
  ModuleMember module;
};

// The members that make validation and test differ.
struct EvaluationHooks {
  Hook<CallbackHook, ModuleHook> start, epoch_start;
  Hook<CallbackBatchHook, ModuleBatchHook> batch_start, batch_end;
  Hook<CallbackHook, ModuleHook> epoch_end, end;
  ModuleBatchHook step;
};

constexpr EvaluationHooks kValidationHooks{
    .start = {&Callback::on_validation_start, &Module::on_validation_start},
    .epoch_start = {&Callback::on_validation_epoch_start, &Module::on_validation_epoch_start},
    .batch_start = {&Callback::on_validation_batch_start, &Module::on_validation_batch_start},
    .batch_end = {&Callback::on_validation_batch_end, &Module::on_validation_batch_end},
    .epoch_end = {&Callback::on_validation_epoch_end, &Module::on_validation_epoch_end},
    .end = {&Callback::on_validation_end, &Module::on_validation_end},
    .step = &Module::validation_step};

constexpr EvaluationHooks kTestHooks{.start = {&Callback::on_test_start, &Module::on_test_start},
                                     .epoch_start = {&Callback::on_test_epoch_start, &Module::on_test_epoch_start},
                                     .batch_start = {&Callback::on_test_batch_start, &Module::on_test_batch_start},
                                     .batch_end = {&Callback::on_test_batch_end, &Module::on_test_batch_end},
                                     .epoch_end = {&Callback::on_test_epoch_end, &Module::on_test_epoch_end},
                                     .end = {&Callback::on_test_end, &Module::on_test_end},
                                     .step = &Module::test_step};

// Calls `body(batch)` for every batch of one epoch.
template <class Body>
void for_each_batch(LoopContext& context, Loader& loader, const Body& body) {
  loader.begin_epoch(0);
  while (const std::optional<Batch> batch = loader.next()) {
    body(context.strategy.to_device(*batch));
    ++context.state.batch_idx;
  }
}

}  // namespace

Metrics run_evaluation(LoopContext& context, Stage stage, Loader& loader) {
  const EvaluationHooks& phase = stage == Stage::test ? kTestHooks : kValidationHooks;
  HookCaller& hooks = context.hooks;
  const c10::NoGradGuard no_grad;
  const EvalMode eval_mode(hooks.module());
  const StageScope scope(context.state, stage, loader.num_batches());
  const auto call = [&](LogScope log_scope, const auto& hook) { hooks.call(log_scope, hook.callback, hook.module); };

  context.metrics.begin_epoch(stage);
  call(LogScope::epoch, phase.start);
  call(LogScope::epoch, phase.epoch_start);
  for_each_batch(context, loader, [&](const Batch& batch) {
    const int64_t batch_idx = context.state.batch_idx;
    const auto log_scope = LogScope::evaluation_step;
    hooks.call(log_scope, &batch, phase.batch_start.callback, phase.batch_start.module, batch, batch_idx);
    (hooks.module().*phase.step)(batch, batch_idx);
    hooks.call(log_scope, &batch, phase.batch_end.callback, phase.batch_end.module, batch, batch_idx);
  });
  call(LogScope::epoch, phase.epoch_end);
  const Metrics metrics = context.metrics.end_epoch(stage);
  if (!metrics.empty()) {
    hooks.call_callbacks(LogScope::forbidden, any_callback, &Callback::on_metrics, metrics, context.state.last_step());
  }
  call(LogScope::forbidden, phase.end);
  return metrics;
}

std::vector<Batch> run_prediction(LoopContext& context, Loader& loader) {
  HookCaller& hooks = context.hooks;
  const c10::NoGradGuard no_grad;
  const EvalMode eval_mode(hooks.module());
  const StageScope scope(context.state, Stage::predict, loader.num_batches());
  const auto log_scope = LogScope::forbidden;

  std::vector<Batch> predictions;
  hooks.call(log_scope, &Callback::on_predict_start, &Module::on_predict_start);
  hooks.call(log_scope, &Callback::on_predict_epoch_start, &Module::on_predict_epoch_start);
  for_each_batch(context, loader, [&](const Batch& batch) {
    const int64_t batch_idx = context.state.batch_idx;
    hooks.call(log_scope, &batch, &Callback::on_predict_batch_start, &Module::on_predict_batch_start, batch, batch_idx);
    predictions.push_back(hooks.module().predict_step(batch, batch_idx));
    hooks.call(log_scope, &batch, &Callback::on_predict_batch_end, &Module::on_predict_batch_end, predictions.back(),
               batch, batch_idx);
  });
  hooks.call(log_scope, &Callback::on_predict_epoch_end, &Module::on_predict_epoch_end);
  hooks.call(log_scope, &Callback::on_predict_end, &Module::on_predict_end);
  return predictions;
}

}  // namespace fulgur
