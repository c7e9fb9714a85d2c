#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <string_view>

#include "fulgur/base/choice.h"
#include "fulgur/base/describe.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// The options struct of a strategy: its registered name and its fields.
template <class T>
concept StrategyOptions = requires(T options, FieldVisitor& visit) {
  { T::kName } -> std::convertible_to<std::string_view>;
  options.describe(visit);
};

// A strategy by name, with its settings: `.strategy = "ddp"`, `.strategy = Ddp{.bucket_cap_mib = 10}`, or, on a
// command line, --strategy=ddp --strategy.bucket_cap_mib=10.
class StrategyChoice {
 public:
  StrategyChoice() : StrategyChoice("auto") {}
  StrategyChoice(std::string_view name) : choice_(name) {}                             // NOLINT: all implicit
  StrategyChoice(const char* name) : StrategyChoice(std::string_view(name)) {}         // NOLINT
  StrategyChoice(const std::string& name) : StrategyChoice(std::string_view(name)) {}  // NOLINT
  template <StrategyOptions T>
  StrategyChoice(T options) : StrategyChoice(std::string_view(T::kName)) {  // NOLINT
    choice_.take_settings([&](FieldVisitor& visit) { options.describe(visit); });
  }

  const std::string& name() const { return choice_.name(); }
  bool is_auto() const { return choice_.is("auto"); }

  // Creates the chosen strategy, or `if_auto` if the choice is auto. Throws UsageError for an unknown name, an
  // unknown setting, or a wrong value.
  std::unique_ptr<Strategy> make(std::string_view if_auto) const;

  // Visits the flags: `strategy`, and `strategy.X` for each setting X of any registered strategy.
  void describe(FieldVisitor& visit);

 private:
  Choice choice_;
};

}  // namespace fulgur
