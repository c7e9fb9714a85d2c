#pragma once

#include "fulgur/base/registry.h"
#include "fulgur/strategies/presets/ddp.h"
#include "fulgur/strategies/presets/ddp_sharded.h"
#include "fulgur/strategies/presets/delayed_update.h"
#include "fulgur/strategies/presets/dp.h"
#include "fulgur/strategies/presets/single_device.h"
#include "fulgur/strategies/presets/zero_offload.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

using StrategyRegistry = Registry<Strategy>;

// The built-in strategies and those that users added. Register your own before the first Trainer is made:
//   strategy_registry().add("mine", [] { return std::make_unique<Mine>(); });
StrategyRegistry& strategy_registry();

}  // namespace fulgur
