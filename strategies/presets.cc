#include "fulgur/strategies/presets.h"

#include <memory>

#include "fulgur/strategies/engine/flat_strategy.h"

namespace fulgur {
namespace {

void register_builtin_strategies(StrategyRegistry& registry) {  // the one place that names every strategy
  registry.add(SingleDevice::kName, [] { return std::make_unique<FlatStrategy>(SingleDevice()); });
  registry.add(Dp::kName, [] { return std::make_unique<FlatStrategy>(Dp()); });
  registry.add(Ddp::kName, [] { return std::make_unique<FlatStrategy>(Ddp()); });
  registry.add(DdpSharded::kName, [] { return std::make_unique<FlatStrategy>(DdpSharded()); });
  registry.add(ZeroOffload::kName, [] { return std::make_unique<FlatStrategy>(ZeroOffload()); });
  registry.add(DelayedUpdate::kName, [] { return std::make_unique<FlatStrategy>(DelayedUpdate()); });
}

}  // namespace

StrategyRegistry& strategy_registry() {
  static StrategyRegistry registry = [] {
    StrategyRegistry builtin("strategy");
    register_builtin_strategies(builtin);
    return builtin;
  }();
  return registry;
}

}  // namespace fulgur
