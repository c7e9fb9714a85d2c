#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "fulgur/core/ranks.h"
#include "fulgur/core/run_state.h"
#include "fulgur/loops/loop_plan.h"
#include "fulgur/loops/signal_watch.h"
#include "fulgur/loops/stop_request.h"

namespace fulgur {

// When fit ends: at the first bound that is reached, or at a requested stop once the minimum bounds are reached.
//   A stop that has waited for min_epochs or min_steps is kept in checkpoints (stop_has_waited()), so that a run that
//   resumes ends where the whole run ends. It is forgotten if min_epochs, min_steps or max_time are others by then, or
//   if a callback that the checkpoint has the state of is gone or has other options, such as a larger patience of
//   EarlyStopping: then the stop may have lost its reason, and whoever still has one requests it again.
class FitBounds {
 public:
  using Clock = std::chrono::steady_clock;

  // All references are borrowed. max_time counts from `start`.
  FitBounds(const LoopPlan& plan, const RunState& state, const StopRequest& stop, Ranks& ranks,
            const SignalWatch& signals, Clock::time_point start);

  bool max_steps_reached() const;
  bool max_epochs_reached() const;
  bool should_stop();            // a stop is requested, and min_epochs and min_steps are reached
  bool stop_has_waited() const;  // a stop was requested before the minima were reached
  void restore_stop();           // requests again the stop that the run that saved had waiting

  // With several ranks, all ranks stop at the same step: the one at which they last agreed to.
  bool wants_stop();  // whether this rank wants to stop: by request, by a signal, or by max_time
  void agree(bool any_wants_stop);
  void agree();  // a collective call of all ranks; a stop that is requested later takes effect at the next call

  // The signal that ends fit between two steps, without a last validation or the end of the epoch; 0: none. The same
  // on every rank since the last agree().
  int signal() const { return signal_; }
  void look_for_signal();  // updates signal() between two calls of agree(), in a single process only

  bool done() { return max_epochs_reached() || max_steps_reached() || should_stop(); }

 private:
  bool time_is_over();
  bool minima_reached() const;
  void find_signal();

  const LoopPlan& plan_;
  const RunState& state_;
  const StopRequest& stop_;
  Ranks& ranks_;
  const SignalWatch& signals_;
  bool agreed_ = false;
  bool is_restored_ = false, stop_has_waited_ = false;
  int signal_ = 0;
  const Clock::time_point start_;
  bool has_logged_time_ = false, has_logged_minimum_ = false;
};

// Looks for a signal during a validation: called before each batch, on every rank. A single process looks each time.
// With several ranks a look is a collective call, so that they count batches until the next look: the number that the
// slowest rank runs in about half a second, and at most twice the previous number.
class SignalPoll {
 public:
  SignalPoll(FitBounds& bounds, Ranks& ranks) : bounds_(bounds), ranks_(ranks) {}

  bool operator()();  // true, on every rank: a signal has come

 private:
  int64_t next_interval();

  FitBounds& bounds_;
  Ranks& ranks_;
  int64_t interval_ = 0;   // batches from the last look to the next; 0: no look yet
  int64_t remaining_ = 0;  // batches until the next look
  FitBounds::Clock::time_point last_look_ = FitBounds::Clock::now();
};

}  // namespace fulgur
