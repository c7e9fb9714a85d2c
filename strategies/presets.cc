#include "fulgur/strategies/presets.h"

#include <memory>
#include <string>

#include "fulgur/strategies/engine/flat_strategy.h"

namespace fulgur {
namespace {

// The engine with the settings of one preset.
template <class Options>
class Preset final : public FlatStrategy {
 public:
  std::string name() const override { return std::string(Options::kName); }
  void describe(FieldVisitor& visit) override { options_.describe(visit); }

 private:
  EngineOptions engine_options() const override { return options_.engine_options(); }

  Options options_{};
};

template <class Options>
void add(StrategyRegistry& registry) {
  registry.add(Options::kName, [] { return std::make_unique<Preset<Options>>(); });
}

void register_builtin_strategies(StrategyRegistry& registry) {  // the one place that names every strategy
  add<SingleDevice>(registry);
  add<Dp>(registry);
  add<Ddp>(registry);
  add<DdpSharded>(registry);
  add<ZeroOffload>(registry);
  add<DelayedUpdate>(registry);
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
