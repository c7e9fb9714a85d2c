#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace fulgur {

class State;  // base/state.h

// How a learning rate changes over a run: a function of the step, except for ReduceLROnPlateau, which also reads a
// metric. optim/lr_schedulers.h has the built-in schedulers.
class LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  virtual std::string_view name() const = 0;

  // The learning rate of a group that began with `initial_lr`, after `step` (>= 0) steps of the schedule.
  virtual double lr(double initial_lr, int64_t step) const = 0;

  // True for a schedule that follows a metric, such as ReduceLROnPlateau: observe() then gets the value of
  // LRSchedulerConfig::monitor, once before each step of the schedule.
  virtual bool needs_metric() const { return false; }
  virtual void observe(double /*metric*/) {}

  // True if the schedule steps, without observe(), as long as the metric may not be known yet: up to the end of the
  // first validation. A warm-up in front of a plateau does.
  virtual bool steps_without_metric() const { return false; }

  // State that is not a function of the step; empty for most schedulers.
  virtual State state() const;
  virtual void load_state(const State& state);
};

// A scheduler and when it steps. Names and meanings are Lightning's.
struct LRSchedulerConfig {
  std::shared_ptr<LRScheduler> scheduler{};
  std::string interval = "epoch";  // epoch, or step: an optimizer step
  int64_t frequency = 1;           // steps once every `frequency` intervals
  std::string monitor{};           // the logged metric for a scheduler that needs one
  bool strict = true;              // if the monitor was not logged: true: an error; false: a warning, and no step
                                   // (unless steps_without_metric())
  std::string name{};              // name of the learning rate for LearningRateMonitor; empty: lr-<optimizer>
};

// Throws UsageError: no scheduler, an unknown interval, a frequency below 1, or no monitor for a scheduler that needs
// one.
void check_scheduler_config(const LRSchedulerConfig& config);

}  // namespace fulgur
