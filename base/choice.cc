#include "fulgur/base/choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

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

// A setting of one or more candidates.
struct Setting {
  std::string name, help, unit, default_text;  // as the first of `candidates` describes it
  std::vector<std::string> candidates{};
  std::vector<std::pair<std::string, std::vector<std::string>>> other_defaults{};  // with the candidates that have each
};

void note_default(Setting& setting, const std::string& candidate, const std::string& text) {
  if (text == setting.default_text) return;
  auto same = std::ranges::find(setting.other_defaults, text, [](const auto& entry) { return entry.first; });
  if (same == setting.other_defaults.end()) same = setting.other_defaults.insert(same, {text, {}});
  same->second.push_back(candidate);
}

// "; by default 0.001; Adagrad, RMSprop: 0.01; LARS: 0.1"; empty if all candidates have the same.
std::string defaults_of(const Setting& setting) {
  if (setting.other_defaults.empty()) return "";
  std::string text = fmt::format("; by default {}", setting.default_text.empty() ? "empty" : setting.default_text);
  for (const auto& [value, candidates] : setting.other_defaults) {
    text += fmt::format("; {}: {}", fmt::join(candidates, ", "), value.empty() ? "empty" : value);
  }
  return text;
}

std::vector<Setting> all_settings(const Choice::Candidates& candidates) {
  std::vector<Setting> settings;
  size_t num_with_settings = 0;
  for (const std::string& candidate : candidates.names) {
    bool has_settings = false;
    Visitor collect([&](const Field& field, const FieldValue& value) {
      has_settings = true;
      auto setting = std::ranges::find(settings, field.name, &Setting::name);
      if (setting == settings.end()) {
        setting = settings.insert(setting, {.name = std::string(field.name),
                                            .help = std::string(field.help),
                                            .unit = std::string(field.unit),
                                            .default_text = field_text(value)});
      }
      setting->candidates.push_back(candidate);
      note_default(*setting, candidate, field_text(value));
    });
    candidates.describe(candidate, collect);
    num_with_settings += has_settings ? 1 : 0;
  }
  for (Setting& setting : settings) {
    const bool is_of_all = setting.candidates.size() == num_with_settings;
    if (!is_of_all) setting.help += fmt::format(" ({})", fmt::join(setting.candidates, ", "));
    setting.help += defaults_of(setting);
  }
  return settings;
}

// " (or zero_offload, delayed_update)": all but the first.
std::string or_others(const std::vector<std::string>& candidates) {
  if (candidates.size() == 1) return "";
  return fmt::format(" (or {})", fmt::join(candidates.begin() + 1, candidates.end(), ", "));
}

}  // namespace

bool Choice::is(std::string_view name) const { return canonical_name(name_) == canonical_name(name); }

void Choice::take_settings(const DescribeFields& describe) {
  Visitor take(
      [this](const Field& field, const FieldValue& value) { settings_[std::string(field.name)] = field_text(value); });
  describe(take);
}

void Choice::describe(FieldVisitor& visit, const Field& field, const Candidates& candidates) {
  const std::string option(field.name);
  const auto set_name = [this, names = candidates.names, option](std::string_view text) {
    const auto same = [&](const std::string& name) { return canonical_name(name) == canonical_name(text); };
    if (std::ranges::none_of(names, same)) throw UsageError(unknown_name_message(option, text, names));
    name_ = text;
  };
  Field named = field;
  named.choices = candidates.names;
  visit(named, TextField{set_name, [this] { return name_; }});

  const auto chosen = std::ranges::find_if(candidates.names, [this](const std::string& name) { return is(name); });
  std::map<std::string, std::string> defaults;
  if (chosen != candidates.names.end()) {
    Visitor collect(
        [&](const Field& own, const FieldValue& value) { defaults[std::string(own.name)] = field_text(value); });
    candidates.describe(*chosen, collect);
  }
  for (const Setting& setting : all_settings(candidates)) {
    const std::string& name = setting.name;
    const auto own = defaults.find(name);
    const std::string by_default = own == defaults.end() ? setting.default_text : own->second;
    const auto get = [this, name, by_default] {
      const auto set = settings_.find(name);
      return set == settings_.end() ? by_default : set->second;
    };
    const auto set = [this, name](std::string_view text) { settings_[name] = text; };
    // Whether the text can be given to what is chosen, or, with auto, to the first that has such a setting. It is tried
    // on an object that is thrown away.
    const auto check = [this, name, candidates](std::string_view field_name) {
      const auto text = settings_.find(name);
      if (text == settings_.end()) return;
      bool is_tried = false;
      Visitor try_out([&](const Field& of, const FieldValue& value) {
        if (of.name != name || is_tried) return;
        Field whole = of;
        whole.name = field_name;
        is_tried = true;
        set_field(whole, value, text->second);
      });
      for (const std::string& candidate : is("auto") ? candidates.names : std::vector{name_}) {
        candidates.describe(candidate, try_out);
      }
    };
    const std::string path = fmt::format("{}.{}", option, name);
    const bool applies = own != defaults.end() || (is("auto") && settings_.contains(name));
    visit({.name = path, .help = setting.help, .unit = setting.unit, .applies = applies, .used_by = setting.candidates},
          TextField{.set = set, .get = get, .check = check});
  }
}

void Choice::apply(std::string_view field, std::string_view chosen, const DescribeFields& describe,
                   const Candidates& candidates) const {
  std::vector<std::string> known;
  auto left = settings_;
  Visitor set([&](const Field& own, const FieldValue& value) {
    known.emplace_back(own.name);
    const auto setting = left.extract(std::string(own.name));
    if (!setting) return;
    const std::string path = fmt::format("{}.{}", field, setting.key());
    Field whole = own;
    whole.name = path;
    set_field(whole, value, setting.mapped());
  });
  describe(set);
  if (left.empty()) return;
  const auto& [unknown, text] = *left.begin();
  const std::vector<Setting> of_all = all_settings(candidates);
  const auto elsewhere = std::ranges::find(of_all, unknown, &Setting::name);
  if (elsewhere != of_all.end()) {
    throw UsageError(fmt::format(
        "{}.{} = {} is set, but {} '{}' has no such setting; write {} = '{}'{}, or leave {}.{} out", field, unknown,
        text, field, chosen, field, elsewhere->candidates.front(), or_others(elsewhere->candidates), field, unknown));
  }
  if (known.empty()) {
    throw UsageError(
        fmt::format("{} '{}' has no settings, but {}.{} is set; leave it out", field, chosen, field, unknown));
  }
  throw UsageError(unknown_name_message(fmt::format("setting of {} '{}'", field, chosen), unknown, known));
}

}  // namespace fulgur
