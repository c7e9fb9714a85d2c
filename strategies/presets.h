#pragma once

#include "fulgur/base/registry.h"
#include "fulgur/strategies/preset_options.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

using StrategyRegistry = Registry<Strategy>;

// The built-in strategies and those that users added. Register your own before the first Trainer is made:
//   strategy_registry().add("mine", [] { return std::make_unique<Mine>(); });
StrategyRegistry& strategy_registry();

}  // namespace fulgur
