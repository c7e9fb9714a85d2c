#include "fulgur/strategies/strategy_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "fulgur/base/error.h"
#include "fulgur/strategies/presets.h"

namespace fulgur {
namespace {

// A FieldVisitor that calls a function.
template <class Visit>
class Visitor final : public FieldVisitor {
 public:
  explicit Visitor(Visit visit) : visit_(std::move(visit)) {}
  void operator()(const Field& field, FieldValue value) override { visit_(field, value); }

 private:
  Visit visit_;
};

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

// A setting of one or more strategies.
struct Setting {
  std::string help{}, default_text{};
  std::vector<std::string> strategies{};
};

std::map<std::string, Setting> all_settings() {
  std::map<std::string, Setting> settings;
  for (const std::string& name : strategy_registry().names()) {
    Visitor collect([&](const Field& field, const FieldValue& value) {
      Setting& setting = settings[std::string(field.name)];
      setting.help = field.help;
      setting.default_text = field_text(value);
      setting.strategies.push_back(name);
    });
    strategy_registry().create(name)->describe(collect);
  }
  return settings;
}

// The settings of one strategy, with their defaults; none for auto or an unknown name.
std::map<std::string, std::string> defaults_of(const std::string& strategy) {
  std::map<std::string, std::string> defaults;
  const std::vector<std::string> names = strategy_registry().names();
  if (std::ranges::find(names, canonical_name(strategy)) == names.end()) return defaults;  // make() refuses it
  Visitor collect(
      [&](const Field& field, const FieldValue& value) { defaults[std::string(field.name)] = field_text(value); });
  strategy_registry().create(strategy)->describe(collect);
  return defaults;
}

// Flags keep views of their texts, so texts are kept until the process exits.
std::string_view kept(std::string text) {
  static std::mutex mutex;  // Trainers may be created on several threads
  static std::set<std::string> texts;
  const std::lock_guard lock(mutex);
  return *texts.insert(std::move(text)).first;
}

}  // namespace

std::unique_ptr<Strategy> StrategyChoice::make(std::string_view if_auto) const {
  check_name(name_);
  std::unique_ptr<Strategy> strategy = strategy_registry().create(is_auto() ? if_auto : std::string_view(name_));
  std::vector<std::string> known;
  auto left = settings_;
  Visitor set([&](const Field& field, const FieldValue& value) {
    known.emplace_back(field.name);
    const auto setting = left.extract(std::string(field.name));
    if (!setting) return;
    const std::string full_name = "strategy." + setting.key();
    Field full = field;
    full.name = full_name;
    set_field(full, value, setting.mapped());
  });
  strategy->describe(set);
  if (left.empty()) return strategy;
  const std::string unknown = left.begin()->first;
  if (known.empty()) {
    throw UsageError(fmt::format("strategy '{}' has no settings, but strategy.{} is set", strategy->name(), unknown));
  }
  throw UsageError(unknown_name_message(fmt::format("setting of strategy '{}'", strategy->name()), unknown, known));
}

void StrategyChoice::describe(FieldVisitor& visit) {
  const auto set_name = [this](std::string_view text) {
    check_name(text);
    name_ = text;
  };
  visit({.name = "strategy", .help = "how to train", .choices = known_names()},
        TextField{set_name, [this] { return name_; }});
  const std::map<std::string, std::string> defaults = defaults_of(name_);
  for (const auto& [name, setting] : all_settings()) {
    const auto chosen = defaults.find(name);
    const std::string by_default = chosen == defaults.end() ? setting.default_text : chosen->second;
    const auto get = [this, name, by_default] {
      const auto own = settings_.find(name);
      return own == settings_.end() ? by_default : own->second;
    };
    visit({.name = kept("strategy." + name),
           .help = kept(fmt::format("{} ({})", setting.help, fmt::join(setting.strategies, ", "))),
           .applies = chosen != defaults.end() || settings_.contains(name)},
          TextField{[this, name](std::string_view text) { settings_[name] = text; }, get});
  }
}

void StrategyChoice::take_settings(const std::function<void(FieldVisitor&)>& describe) {
  Visitor take(
      [this](const Field& field, const FieldValue& value) { settings_[std::string(field.name)] = field_text(value); });
  describe(take);
}

}  // namespace fulgur
