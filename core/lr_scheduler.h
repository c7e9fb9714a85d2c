#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace fulgur {

// How a learning rate changes over a run: a function of the step, apart from ReduceLROnPlateau, which also looks at a
// metric. optim/lr_schedulers.h has the ones to use.
class LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  virtual std::string_view name() const = 0;

  // The learning rate of a group that began with `initial_lr`, after `step` (>= 0) steps of the schedule.
  virtual double lr(double initial_lr, int64_t step) const = 0;

  // Plateau only: takes the monitored metric, once before each step of the schedule.
  virtual bool needs_metric() const { return false; }
  virtual void observe(double /*metric*/) {}

  // What is not a function of the step; empty for most.
  virtual nlohmann::json state() const;
  virtual void load_state(const nlohmann::json& state);
};

// A scheduler and when it moves. Names and meanings are Lightning's.
struct LRSchedulerConfig {
  std::shared_ptr<LRScheduler> scheduler{};
  std::string interval = "epoch";  // epoch or step (of the optimizer)
  int64_t frequency = 1;           // moves every so many intervals
  std::string monitor{};           // the logged metric that a scheduler which needs one looks at
  bool strict = true;              // a monitor that nobody logged: true: an error; false: a warning, and no move
  std::string name{};              // for logs
};

// Throws UsageError: no scheduler, an unknown interval, a frequency below 1, or no monitor for a scheduler that needs
// one.
void check_scheduler_config(const LRSchedulerConfig& config);

}  // namespace fulgur
