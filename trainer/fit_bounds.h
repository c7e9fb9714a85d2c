#pragma once

#include <chrono>

#include "core/ranks.h"
#include "core/run_state.h"
#include "trainer/trainer_options.h"

namespace fulgur {

// When fit ends: at the first bound that is reached, or at a requested stop once the minimum bounds are.
class FitBounds {
 public:
  // All are borrowed. max_time runs from here.
  FitBounds(const TrainerOptions& options, const RunState& state, const bool& stop_requested, Ranks& ranks);

  bool max_steps_reached() const;
  bool max_epochs_reached() const;
  bool should_stop();  // a stop is wanted, and min_epochs and min_steps are reached

  // With several ranks all stop at the same place: where they have last told each other what they want.
  bool wants_stop();  // this rank: somebody asked for it, or the time is over
  void agree(bool any_wants_stop) { agreed_ = agreed_ || any_wants_stop; }
  void agree();  // asks the others, who do the same

  bool done() { return max_epochs_reached() || max_steps_reached() || should_stop(); }

 private:
  using Clock = std::chrono::steady_clock;
  bool time_is_over();

  const TrainerOptions& options_;
  const RunState& state_;
  const bool& stop_requested_;
  Ranks& ranks_;
  bool agreed_ = false;
  const Clock::time_point start_ = Clock::now();
  bool told_time_ = false, told_minimum_ = false;
};

}  // namespace fulgur
