#pragma once

#include <concepts>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/names.h"
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
  StrategyChoice() = default;                                                          // auto
  StrategyChoice(std::string_view name) : name_(name) {}                               // NOLINT: all implicit
  StrategyChoice(const char* name) : StrategyChoice(std::string_view(name)) {}         // NOLINT
  StrategyChoice(const std::string& name) : StrategyChoice(std::string_view(name)) {}  // NOLINT
  template <StrategyOptions T>
  StrategyChoice(T options) : StrategyChoice(std::string_view(T::kName)) {  // NOLINT
    take_settings([&](FieldVisitor& visit) { options.describe(visit); });
  }

  const std::string& name() const { return name_; }
  bool is_auto() const { return canonical_name(name_) == "auto"; }

  // Creates the chosen strategy, or `if_auto` if the choice is auto. Throws UsageError for an unknown name, an
  // unknown setting, or a wrong value.
  std::unique_ptr<Strategy> make(std::string_view if_auto) const;

  // Visits the flags: `strategy`, and `strategy.X` for each setting X of any registered strategy.
  void describe(FieldVisitor& visit);

 private:
  void take_settings(const std::function<void(FieldVisitor&)>& describe);

  std::string name_ = "auto";
  std::map<std::string, std::string, std::less<>> settings_{};  // values as text
};

}  // namespace fulgur
