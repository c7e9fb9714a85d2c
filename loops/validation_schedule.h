#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "fulgur/core/run_state.h"
#include "fulgur/loops/loop_plan.h"

namespace fulgur {

// After which training batches fit validates: val_check_interval within those epochs that check_val_every_n_epoch
// picks.
class ValidationSchedule {
 public:
  explicit ValidationSchedule(const LoopPlan& plan);

  // Sets the number of batches of a training epoch; nullopt: unknown. Called before due(). Throws SetupError if the
  // interval does not fit the number.
  void set_num_batches(std::optional<int64_t> num_batches);

  bool only_at_epoch_end() const { return !every_n_batches_ && !every_; }
  bool is_by_clock() const { return every_.has_value(); }
  bool validates_in(int64_t epoch) const;

  // Whether to validate after the batch that `state` shows; `total_batches` counts the batches of all epochs.
  bool due(const RunState& state, int64_t total_batches) const;

  void restart_clock() { last_ = Clock::now(); }  // when training starts, and after a validation

 private:
  using Clock = std::chrono::steady_clock;

  ValidationInterval interval_;
  std::optional<int64_t> every_n_epoch_;
  std::optional<int64_t> every_n_batches_;              // nullopt: see every_
  std::optional<std::chrono::duration<double>> every_;  // both nullopt: at the end of the epoch
  Clock::time_point last_ = Clock::now();
};

}  // namespace fulgur
