#pragma once

#include "core/metric_log.h"
#include "core/run_state.h"
#include "strategies/strategy.h"
#include "trainer/hook_caller.h"
#include "trainer/trainer_options.h"

namespace fulgur {

// What every loop works with. Owned by the Trainer, for the length of one entry point.
struct LoopContext {
  const TrainerOptions& options;
  Strategy& strategy;
  RunState& state;
  MetricLog& metrics;
  HookCaller& hooks;
  const bool& should_stop;  // a callback asked for the end of fit
};

}  // namespace fulgur
