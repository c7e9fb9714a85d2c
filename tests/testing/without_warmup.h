#pragma once

#include <string_view>

#include "fulgur/strategies/presets/delayed_update.h"
#include "fulgur/strategies/strategy_choice.h"

namespace fulgur::testing {

// The strategy of this name; delayed_update delays updates from the first step on.
inline StrategyChoice without_warmup(std::string_view name) {
  return name == DelayedUpdate::kName ? StrategyChoice(DelayedUpdate{.warmup_steps = 0}) : StrategyChoice(name);
}

}  // namespace fulgur::testing
