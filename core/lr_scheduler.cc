#include "fulgur/core/lr_scheduler.h"

#include <fmt/format.h>

#include <array>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/state.h"

namespace fulgur {

State LRScheduler::state() const { return {}; }

void LRScheduler::load_state(const State&) {}

void check_scheduler_config(const LRSchedulerConfig& config) {
  if (config.scheduler == nullptr)
    throw UsageError("a learning-rate scheduler is null; make one, such as optim::StepLR::make");
  const std::string_view name = config.scheduler->name();
  const std::array<std::string, 2> intervals{"epoch", "step"};
  if (config.interval != "epoch" && config.interval != "step") {
    throw UsageError(fmt::format("{}: {}", name, unknown_name_message("interval", config.interval, intervals)));
  }
  if (config.frequency < 1)
    throw UsageError(fmt::format("{}: frequency must be at least 1; got {}", name, config.frequency));
  if (config.scheduler->needs_metric() && config.monitor.empty()) {
    throw UsageError(
        fmt::format("{} needs a metric to look at; write {{.scheduler = ..., .monitor = \"val_loss\"}}", name));
  }
}

}  // namespace fulgur
