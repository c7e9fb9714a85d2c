#include "fulgur/strategies/strategy_choice.h"

#include <algorithm>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/strategies/presets.h"

namespace fulgur {
namespace {

std::vector<std::string> known_names() {
  std::vector<std::string> names = strategy_registry().names();
  names.insert(names.begin(), "auto");
  return names;
}

void check_name(std::string_view asked) {
  const std::vector<std::string> names = known_names();
  const auto same = [&](const std::string& name) { return canonical_name(name) == canonical_name(asked); };
  if (std::ranges::none_of(names, same)) throw UsageError(unknown_name_message("strategy", asked, names));
}

void describe_one(const std::string& name, FieldVisitor& settings) {
  if (canonical_name(name) != "auto") strategy_registry().create(name)->describe(settings);
}

}  // namespace

std::unique_ptr<Strategy> StrategyChoice::make(std::string_view if_auto) const {
  check_name(name());
  std::unique_ptr<Strategy> strategy = strategy_registry().create(is_auto() ? if_auto : std::string_view(name()));
  choice_.apply("strategy", strategy->name(), [&](FieldVisitor& visit) { strategy->describe(visit); },
                {.names = known_names(), .describe = describe_one});
  return strategy;
}

void StrategyChoice::describe(FieldVisitor& visit) {
  choice_.describe(visit, {.name = "strategy", .help = "how to train", .is_common = true},
                   {.names = known_names(), .describe = describe_one});
}

}  // namespace fulgur
