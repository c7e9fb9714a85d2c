#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <utility>

#include "fulgur/core/make_module.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/run_state.h"
#include "fulgur/data/data_module.h"
#include "fulgur/distributed/rank_messages.h"
#include "fulgur/distributed/world.h"
#include "fulgur/loops/checkpoint_saver.h"
#include "fulgur/loops/hook_caller.h"
#include "fulgur/loops/loop_plan.h"
#include "fulgur/loops/non_finite.h"
#include "fulgur/loops/signal_watch.h"
#include "fulgur/loops/stop_request.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// What the owner of a run does at the points where a loop calls it.
class LoopEvents {
 public:
  virtual ~LoopEvents() = default;
  virtual void roll_back_if_asked() = 0;   // every rank calls it before anything is saved, such as at a step's end
  virtual void on_step_boundary() = 0;     // lets ModelCheckpoint save
  virtual void interrupt(int signal) = 0;  // saves, and throws InterruptedError
};

// What the loops of one run work with. Ownership: the Run owns it; the referenced objects live longer.
struct LoopContext {
  const LoopPlan& plan;
  Strategy& strategy;
  World& world;
  const Precision& precision;
  const c10::DeviceType device_type;
  DataModule& data;
  const OverriddenHooks& overridden;
  RunState& state;
  MetricLog& metrics;
  const StopRequest& stop;
  LoopEvents& events;
  HookCaller hooks;
  CollectiveRanks ranks;
  CheckpointSaver saver;
  const SignalWatch signals;
  NonFinite non_finite;
  int64_t accumulate_grad_batches;         // takes effect with the next epoch
  int64_t log_every_n_steps;               // LoopPlan::log_every_n_steps, or what fit chooses by its length
  Batch failed_batch{};                    // the batch in which an exception was thrown; empty: none
  std::optional<RunState> failed_state{};  // the state within an evaluation that an exception has left; nullopt: none

  // The precision scope of evaluation steps; training steps run in the strategy's scope.
  ScopedPrecision precision_scope() const { return ScopedPrecision(precision, device_type); }

  // Whether loggers get the values of `step`, counted from 0; never in barebones mode.
  bool is_logged(int64_t step) const { return log_every_n_steps > 0 && (step + 1) % log_every_n_steps == 0; }

  // Sends metrics to the loggers.
  void send(const Metrics& values, int64_t step) {
    non_finite.look_at(values, step, state);
    hooks.send(values, step);
  }

  // The batch as steps see it: on its device, after the transfer hooks.
  Batch to_device(Batch batch) {
    const auto transfer = [&] {
      batch = hooks.module().on_before_batch_transfer(data.on_before_batch_transfer(std::move(batch)));
      return hooks.module().on_after_batch_transfer(data.on_after_batch_transfer(strategy.to_device(batch)));
    };
    return hooks.within(hooks::batch_transfer, transfer);
  }
};

// A batch that runs for the lifetime of the object. If an exception ends the lifetime, the context keeps the batch for
// the report of the failure.
class RunningBatch {
 public:
  RunningBatch(LoopContext& context, Batch batch)
      : context_(context), batch_(std::move(batch)), num_exceptions_(std::uncaught_exceptions()) {
    context_.metrics.set_batch(&batch_);
  }
  ~RunningBatch() {
    context_.metrics.set_batch(nullptr);
    if (std::uncaught_exceptions() > num_exceptions_) context_.failed_batch = std::move(batch_);
  }
  RunningBatch(const RunningBatch&) = delete;
  RunningBatch& operator=(const RunningBatch&) = delete;

  const Batch& operator*() const { return batch_; }

 private:
  LoopContext& context_;
  Batch batch_;
  const int num_exceptions_;
};

}  // namespace fulgur
