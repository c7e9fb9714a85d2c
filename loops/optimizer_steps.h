#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/core/lr_schedule.h"
#include "fulgur/core/manual_optimization.h"
#include "fulgur/loops/loop_context.h"

namespace fulgur {

// The parts of a training step that concern optimizers, each with its hooks, and the schedules of their learning rates.
// TrainEpochLoop puts them together; in manual optimisation the Module does.
class OptimizerSteps final : public ManualOptimization {
 public:
  // Passes the optimizers to the strategy. Throws SetupError or UsageError if they do not fit the Module or the
  // options.
  OptimizerSteps(LoopContext& context, Optimizers optimizers);

  const Optimizers& optimizers() const override { return context_.strategy.optimizers(); }
  std::vector<LRSchedule>& lr_schedules() override { return schedules_; }
  void zero_grad(size_t optimizer) override;
  void backward(const at::Tensor& loss) override;  // for manual optimisation
  void backward(const at::Tensor& loss, bool is_last);
  void step(size_t optimizer) override { step(optimizer, 1, /*loss=*/0.0); }

  // One update from the gradients summed over `micro_batches`. Returns false if the update was skipped: by the
  // Module's optimizer_step or a callback, or for gradients that are not finite.
  // `loss`: the mean loss of the micro-batches over all ranks, for callbacks that judge_updates().
  bool step(size_t optimizer, int64_t micro_batches, double loss);
  bool judges_updates() const { return judges_updates_; }

  // Whether the first optimizer evaluates loss and gradients itself, through a closure, as often as it needs.
  bool needs_closure() const { return optimizers()[0].needs_closure(); }
  bool step(const Closure& closure);

  // With several ranks: called by a rank that skips the epoch. Throws SetupError on every rank if another rank
  // computes a loss.
  void skip_closure();

  void scale_lr(size_t optimizer, size_t group, double factor);  // TrainerControl::scale_lr

  // Throws SetupError if the optimizer cannot accumulate this number of micro-batches.
  void check_accumulation(int64_t accumulate_grad_batches) const;

  // Advances the schedules of `interval` that are due. Plateau schedules, which read a metric, run after validation.
  enum class Kind { plain, plateau };
  void move_schedules(std::string_view interval, Kind kind);

 private:
  at::Tensor before_step(size_t optimizer, StepRequest& request);
  bool update(size_t optimizer, StepRequest request);
  void move(LRSchedule& schedule);
  bool may_be_logged_yet(const LRSchedulerConfig& config) const;
  void tell_unknown_monitor(const LRSchedule& schedule, const Metrics& metrics);
  std::vector<double> lr_after_step(size_t optimizer) const;
  AccumulationWindow end_evaluation(const AccumulationWindow& mine);

  LoopContext& context_;
  bool wants_gradients_, wants_grad_norm_;      // a hook reads gradients; a callback reads their norm
  bool judges_updates_;                         // a callback judges updates
  WarnOnce warn_skipped_;                       // said once, because skipping a step now and then is normal
  std::set<const LRSchedule*> warned_missing_;  // schedules already warned about: their metric is missing
  std::vector<LRSchedule> schedules_;
};

}  // namespace fulgur
