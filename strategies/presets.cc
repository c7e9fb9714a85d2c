#include "strategies/presets.h"

#include <memory>

#include "strategies/single_device.h"

namespace fulgur {
namespace {

void register_builtin_strategies(StrategyRegistry& registry) {  // the one place that names every strategy
  registry.add("single_device", [] { return std::make_unique<SingleDevice>(); });
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
