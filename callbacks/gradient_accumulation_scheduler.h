#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "fulgur/core/callback.h"

namespace fulgur {

// Changes accumulate_grad_batches with the epoch:
//   GradientAccumulationScheduler::make({{0, 8}, {4, 4}})  // 8 micro-batches per step, from the fifth epoch on 4
// Before the first key the factor is 1. Throws UsageError for an empty schedule, a negative epoch or a factor below 1,
// and SetupError before training if the Trainer has an accumulate_grad_batches of its own, the Module optimises
// manually, or the optimizer evaluates the loss itself (LBFGS) and a factor is above 1.
class GradientAccumulationScheduler final : public Callback {
 public:
  using Schedule = std::map<int64_t, int64_t>;  // micro-batches per step, by the first epoch (0-based) to use them
  explicit GradientAccumulationScheduler(Schedule schedule);
  static std::shared_ptr<GradientAccumulationScheduler> make(Schedule schedule);

  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_fit_start(TrainerControl& trainer) override;
  void on_train_epoch_start(TrainerControl& trainer) override;

 private:
  int64_t factor_in(int64_t epoch) const;

  Schedule schedule_;
};

}  // namespace fulgur
