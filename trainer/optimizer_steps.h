#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "core/lr_schedule.h"
#include "core/manual_optimization.h"
#include "trainer/loop_context.h"

namespace fulgur {

// The parts of a training step that concern optimizers, each with its hooks, and the schedules of their learning rates.
// TrainEpochLoop puts them together; in manual optimisation the Module does.
class OptimizerSteps final : public ManualOptimization {
 public:
  // Hands the optimizers to the strategy. Throws SetupError or UsageError if they do not fit the Module or the options.
  OptimizerSteps(LoopContext& context, Optimizers optimizers);

  const Optimizers& optimizers() const override { return context_.strategy.optimizers(); }
  std::vector<LRSchedule>& lr_schedules() override { return schedules_; }
  void zero_grad(size_t optimizer) override;
  void backward(const at::Tensor& loss) override;  // for manual optimisation
  void backward(const at::Tensor& loss, bool is_last);
  void step(size_t optimizer) override { step(optimizer, 1); }

  // One update from the summed gradients of so many micro-batches. False: the Module's optimizer_step left it out.
  bool step(size_t optimizer, int64_t micro_batches);

  // The first optimizer computes loss and gradients itself, by this, as often as it wants.
  bool needs_closure() const { return optimizers()[0].needs_closure(); }
  bool step(const Closure& closure);

  // With several ranks: this one skips the epoch. Throws SetupError on every rank if another computes a loss meanwhile.
  void skip_closure();

  // Throws SetupError if the optimizer cannot take a step of so many micro-batches.
  void check_accumulation(int64_t accumulate_grad_batches) const;

  // Moves the schedules of an interval that are due. Plateau schedules, which look at a metric, come after validation.
  enum class Kind { plain, plateau };
  void move_schedules(std::string_view interval, Kind kind);

 private:
  GradientClipping trainer_clipping() const;
  void before_step(size_t optimizer, StepRequest& request);
  bool update(size_t optimizer, const StepRequest& request);
  void tell_of_skipped(const StepReport& report);
  void move(LRSchedule& schedule);
  Window end_evaluation(const Window& mine);

  LoopContext& context_;
  bool wants_gradients_;
  bool told_skipped_ = false;
  std::set<const LRSchedule*> told_missing_;  // schedules whose metric was not there, of which that was said
  std::vector<LRSchedule> schedules_;
};

}  // namespace fulgur
