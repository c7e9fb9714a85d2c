#include "fulgur/callbacks/gradient_accumulation_scheduler.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/core/module.h"
#include "fulgur/core/optimizer.h"

namespace fulgur {

GradientAccumulationScheduler::GradientAccumulationScheduler(Schedule schedule) : schedule_(std::move(schedule)) {
  if (schedule_.empty()) {
    throw UsageError("GradientAccumulationScheduler: the schedule is empty; write {{epoch, factor}, ...}");
  }
  for (const auto& [epoch, factor] : schedule_) {
    if (epoch >= 0 && factor >= 1) continue;
    throw UsageError(fmt::format(
        "GradientAccumulationScheduler: epochs count from 0 and factors from 1; got {{{}, {}}}", epoch, factor));
  }
}

std::shared_ptr<GradientAccumulationScheduler> GradientAccumulationScheduler::make(Schedule schedule) {
  return std::make_shared<GradientAccumulationScheduler>(std::move(schedule));
}

// A run that resumes takes over the checkpoint's factor only after setup.
void GradientAccumulationScheduler::setup(TrainerControl& trainer, EntryPoint entry_point) {
  if (entry_point != EntryPoint::fit || trainer.accumulation() == 1) return;
  throw SetupError(fmt::format(
      "accumulate_grad_batches = {} and a GradientAccumulationScheduler contradict each other; leave one of "
      "them out",
      trainer.accumulation()));
}

void GradientAccumulationScheduler::on_fit_start(TrainerControl& trainer) {
  if (!trainer.module().automatic_optimization) {
    throw SetupError(
        fmt::format("{} optimises manually, so that a GradientAccumulationScheduler would have no effect; "
                    "accumulate in training_step, or leave the callback out",
                    trainer.module().name()));
  }
  for (const auto& optimizer : trainer.optimizers()) {
    if (!optimizer->needs_closure()) continue;
    for (const auto& [epoch, factor] : schedule_) {
      if (factor == 1) continue;
      throw SetupError(
          fmt::format("{} computes the gradients itself, of one batch, but the GradientAccumulationScheduler has the "
                      "factor {} from epoch {} on; leave the callback out",
                      optimizer->name(), factor, epoch));
    }
  }
}

void GradientAccumulationScheduler::on_train_epoch_start(TrainerControl& trainer) {
  trainer.set_accumulation(factor_in(trainer.state().epoch));
}

int64_t GradientAccumulationScheduler::factor_in(int64_t epoch) const {
  const auto next = schedule_.upper_bound(epoch);
  return next == schedule_.begin() ? 1 : std::prev(next)->second;
}

}  // namespace fulgur
