#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/ranks.h"
#include "core/run_state.h"
#include "trainer/signal_watch.h"
#include "trainer/trainer_options.h"

namespace fulgur {

// When fit ends: at the first bound that is reached, or at a requested stop once the minimum bounds are.
class FitBounds {
 public:
  using Clock = std::chrono::steady_clock;

  // All are borrowed. max_time runs from `start`.
  FitBounds(const TrainerOptions& options, const RunState& state, const std::atomic<bool>& stop_requested, Ranks& ranks,
            const SignalWatch& signals, Clock::time_point start);

  bool max_steps_reached() const;
  bool max_epochs_reached() const;
  bool is_last_epoch() const;  // max_epochs is reached with the end of this one
  bool should_stop();          // a stop is wanted, and min_epochs and min_steps are reached

  // With several ranks all stop at the same place: where they have last told each other what they want.
  bool wants_stop();  // this rank: somebody asked for it, or the time is over
  void agree(bool any_wants_stop);
  void agree();  // asks the others, who do the same; alone, a stop that is requested later waits for the next call

  // The signal that ends fit between two steps, without a last validation or the end of the epoch; 0: none. On every
  // rank the same, and known since they last agreed.
  int signal() const { return signal_; }
  void look_for_signal();  // one that has come since; only in a single process, as several exchange what they see

  bool done() { return max_epochs_reached() || max_steps_reached() || should_stop(); }

 private:
  bool time_is_over();
  void find_signal();

  const TrainerOptions& options_;
  const RunState& state_;
  const std::atomic<bool>& stop_requested_;
  Ranks& ranks_;
  const SignalWatch& signals_;
  bool agreed_ = false;
  int signal_ = 0;
  const Clock::time_point start_;
  bool told_time_ = false, told_minimum_ = false;
};

// Looks for a signal amid a validation: called before each batch, on every rank. One process looks each time. For
// several ranks a look is an exchange between them, and so they count batches until the next one: as many as the
// slowest rank runs in about half a second, and at most twice as many as before.
class SignalPoll {
 public:
  SignalPoll(FitBounds& bounds, Ranks& ranks) : bounds_(bounds), ranks_(ranks) {}

  bool operator()();  // true: a signal has come, and every rank knows

 private:
  int64_t next_interval();

  FitBounds& bounds_;
  Ranks& ranks_;
  int64_t interval_ = 0;   // batches from the last look to the next; 0: there was none
  int64_t remaining_ = 0;  // batches until the next look
  FitBounds::Clock::time_point last_look_ = FitBounds::Clock::now();
};

}  // namespace fulgur
