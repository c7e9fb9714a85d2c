#include "fulgur/loops/fit_bounds.h"

#include <algorithm>
#include <utility>

#include "fulgur/base/logging.h"

namespace fulgur {

FitBounds::FitBounds(const LoopPlan& plan, const RunState& state, const StopRequest& stop, Ranks& ranks,
                     const SignalWatch& signals, Clock::time_point start)
    : plan_(plan), state_(state), stop_(stop), ranks_(ranks), signals_(signals), start_(start) {}

bool FitBounds::max_steps_reached() const { return plan_.max_steps >= 0 && state_.global_step >= plan_.max_steps; }

bool FitBounds::max_epochs_reached() const { return state_.max_epochs >= 0 && state_.epoch >= state_.max_epochs; }

bool FitBounds::minima_reached() const {
  return state_.epoch >= plan_.min_epochs && state_.global_step >= plan_.min_steps;
}

bool FitBounds::should_stop() {
  if (signal_ != 0 || !agreed_) return false;
  const bool reached = minima_reached();
  if (!reached && !has_logged_minimum_) {
    has_logged_minimum_ = true;
    log_info("a stop was requested, but min_epochs = {} and min_steps = {} come first; training continues",
             plan_.min_epochs, plan_.min_steps);
  }
  return reached;
}

// A request counts before the ranks have agreed on it, because a checkpoint may be saved in between.
bool FitBounds::stop_has_waited() const { return stop_has_waited_ || (stop_.is_requested() && !minima_reached()); }

void FitBounds::restore_stop() { is_restored_ = stop_has_waited_ = true; }

bool FitBounds::wants_stop() {
  return is_restored_ || stop_.is_requested() || signals_.pending() != 0 || time_is_over();
}

// A signal is no request to stop: a run that resumes trains on.
void FitBounds::agree(bool any_wants_stop) {
  agreed_ = agreed_ || any_wants_stop;
  find_signal();
  const bool is_requested = agreed_ && (signal_ == 0 || stop_.is_requested());
  stop_has_waited_ = stop_has_waited_ || (is_requested && !minima_reached());
}

void FitBounds::agree() { agree(ranks_.world_size() > 1 ? any_rank(ranks_, wants_stop()) : wants_stop()); }

// The ranks exchange the signal only after they have agreed to stop.
void FitBounds::find_signal() {
  look_for_signal();
  if (ranks_.world_size() > 1 && agreed_) {
    double pending = signals_.pending();
    ranks_.all_reduce({&pending, 1}, Reduction::max);
    signal_ = static_cast<int>(pending);
  }
}

void FitBounds::look_for_signal() {
  if (ranks_.world_size() == 1) signal_ = signals_.pending();
}

bool FitBounds::time_is_over() {
  if (!plan_.max_time || Clock::now() - start_ < plan_.max_time->seconds()) return false;
  if (!has_logged_time_) log_info("stopping: max_time = {} is over", plan_.max_time->to_string());
  has_logged_time_ = true;
  return true;
}

bool SignalPoll::operator()() {
  if (--remaining_ > 0) return false;
  bounds_.agree();
  remaining_ = ranks_.world_size() > 1 ? next_interval() : 1;
  return bounds_.signal() != 0;
}

int64_t SignalPoll::next_interval() {
  constexpr double kSecondsBetweenLooks = 0.5;
  const auto now = FitBounds::Clock::now();
  double slowest_s = std::chrono::duration<double>(now - std::exchange(last_look_, now)).count();
  ranks_.all_reduce({&slowest_s, 1}, Reduction::max);
  const double most = std::max(1.0, 2.0 * static_cast<double>(interval_));
  const double in_time = static_cast<double>(interval_) * kSecondsBetweenLooks / std::max(slowest_s, 1e-9);
  return interval_ = static_cast<int64_t>(std::clamp(in_time, 1.0, most));
}

}  // namespace fulgur
