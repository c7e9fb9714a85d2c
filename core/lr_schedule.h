#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/core/lr_scheduler.h"
#include "fulgur/core/optimizer.h"

namespace fulgur {

// Applies a scheduler to an optimizer: writes the learning rates of its parameter groups.
// Ownership: borrows the optimizer.
class LRSchedule {
 public:
  LRSchedule(LRSchedulerConfig config, Optimizer& optimizer);  // sets the learning rates of step 0

  // Multiplies the learning rates that later steps give to a parameter group.
  void scale(size_t group, double factor);

  // Advances by one step. `metric` is for a scheduler that needs one; throws c10::ValueError if it is missing, unless
  // the scheduler steps_without_metric().
  void step(std::optional<double> metric = std::nullopt);

  double lr_after_step(size_t group) const;  // what step() will set, for a scheduler that reads no metric

  const LRSchedulerConfig& config() const { return config_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  int64_t num_steps() const { return num_steps_; }

  State state() const;
  void load_state(const State& state);  // does not set learning rates: they are optimizer state

 private:
  void take_new_groups();
  void write_learning_rates();

  LRSchedulerConfig config_;
  Optimizer* optimizer_;
  std::vector<double> initial_lrs_;  // by parameter group; groups may be added later
  std::vector<double> factors_;      // by parameter group: the product of what scale() was given
  int64_t num_steps_ = 0;
};

}  // namespace fulgur
