#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/lr_scheduler.h"
#include "core/optimizer.h"
#include "core/state.h"

namespace fulgur {

// A scheduler at work on an optimizer: writes the learning rates of its groups.
// Ownership: borrows the optimizer.
class LRSchedule {
 public:
  LRSchedule(LRSchedulerConfig config, Optimizer& optimizer);  // sets the learning rates of step 0

  // Moves one step on. `metric` is for a scheduler that needs one: c10::ValueError without.
  void step(std::optional<double> metric = std::nullopt);

  const LRSchedulerConfig& config() const { return config_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  int64_t num_steps() const { return num_steps_; }  // taken

  State state() const;
  void load_state(const State& state);  // the learning rates are the optimizer's state

 private:
  void write_learning_rates();

  LRSchedulerConfig config_;
  Optimizer* optimizer_;
  std::vector<double> initial_lrs_;  // of each group, also of one that was added later
  int64_t num_steps_ = 0;
};

}  // namespace fulgur
