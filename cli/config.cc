#include "fulgur/cli/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/cli/toml_file.h"

namespace fulgur {
namespace {

constexpr std::string_view kTrainer = "trainer.";
constexpr std::string_view kType = ".type";  // strategy.type is what strategy names

// A FieldVisitor that calls a function.
class Visitor final : public FieldVisitor {
 public:
  explicit Visitor(std::function<void(const Field&, const FieldValue&)> visit) : visit_(std::move(visit)) {}
  void operator()(const Field& field, FieldValue value) override { visit_(field, value); }

 private:
  std::function<void(const Field&, const FieldValue&)> visit_;
};

// What a value of a number or a flag is called; empty for values that are text.
std::string_view kind_of(const FieldValue& value) {
  constexpr std::string_view kNames[] = {"true or false", "a whole number", "a number",       "",         "",
                                         "true or false", "a whole number", "a whole number", "a number", "a number"};
  static_assert(std::size(kNames) == std::variant_size_v<FieldValue>);
  return kNames[value.index()];
}

std::string toml_value(const FieldValue& value) {
  const std::string text = field_text(value);
  const bool is_plain = !kind_of(value).empty() && text != "none";
  return is_plain ? text : toml_string(text);
}

// "trainer" of "trainer.max_epochs"; empty for an option outside of sections.
std::string_view section_of(std::string_view path) {
  const size_t end = path.rfind('.');
  return end == std::string_view::npos ? std::string_view() : path.substr(0, end);
}

}  // namespace

Config::Config(DescribeFields describe) : describe_(std::move(describe)) {
  Visitor collect([this](const Field& field, const FieldValue& value) {
    Option& option = options_.emplace_back(
        Option{.field = field, .value = value, .path = std::string(field.name), .help = std::string(field.help)});
    option.field.name = option.path;
    option.field.help = option.help;
  });
  describe_(collect);
}

Config::Option* Config::find(std::string_view path) {
  const std::string wanted = canonical_name(path);
  const auto named = [&](const std::string& name) -> Option* {
    const auto found =
        std::ranges::find_if(options_, [&](const Option& option) { return canonical_name(option.path) == name; });
    return found == options_.end() ? nullptr : &*found;
  };
  if (Option* option = named(wanted)) return option;
  if (Option* option = named(std::string(kTrainer) + wanted)) return option;
  if (wanted.ends_with(kType)) return find(std::string_view(wanted).substr(0, wanted.size() - kType.size()));
  return nullptr;
}

std::string Config::flag_of(const Option& option) const {
  if (!option.path.starts_with(kTrainer)) return option.path;
  const std::string name = option.path.substr(kTrainer.size());
  const bool is_taken = std::ranges::any_of(options_, [&](const Option& other) { return other.path == name; });
  return is_taken ? option.path : name;
}

// The names in the section of `path`, or, if there is no such section, all names.
std::vector<std::string> Config::names_near(std::string_view path) const {
  std::vector<std::string> near, all;
  for (const Option& option : options_) {
    all.push_back(flag_of(option));
    const bool is_near = canonical_name(section_of(option.path)) == canonical_name(section_of(path));
    if (is_near && !section_of(path).empty()) near.push_back(option.path);
  }
  return near.empty() ? all : near;
}

void Config::set(std::span<const Setting> settings, std::vector<std::string>& problems) {
  const auto refuse = [&](const Setting& setting, const std::string& what) {
    problems.push_back(setting.origin == setting.name ? what : fmt::format("{}: {}", setting.origin, what));
  };
  for (const Setting& setting : settings) {
    Option* option = find(setting.path);
    if (option == nullptr) {
      const auto nearest = nearest_name(setting.path, names_near(setting.path));
      problems.push_back(
          fmt::format("{}: unknown option '{}'; {}", setting.origin, setting.path,
                      nearest ? fmt::format("did you mean '{}'?", *nearest) : "--help has those that there are"));
      continue;
    }
    if (!setting.text) {
      refuse(setting, setting.name + " is neither text, a number, true or false, nor a list of these");
      continue;
    }
    const std::string_view kind = kind_of(option->value);
    if (setting.is_quoted && !kind.empty() && canonical_name(*setting.text) != "none") {
      refuse(setting, fmt::format("{} must be {}; got the text \"{}\"", setting.name, kind, *setting.text));
      continue;
    }
    Field field = option->field;
    field.name = setting.name;
    try {
      set_field(field, option->value, *setting.text);
      option->origin = setting.origin;
    } catch (const UsageError& error) {
      refuse(setting, error.what());
    }
  }
}

// Options outside of sections come first, as TOML wants it. An option that has settings of its own, such as strategy,
// becomes a section with a `type`. Settings of what was not chosen are left out.
std::string Config::to_toml() const {
  std::map<std::string, std::string> origins;
  for (const Option& option : options_) origins[option.path] = option.origin;
  std::vector<std::pair<std::string, std::string>> lines;  // section, and the line in it
  std::vector<std::string> sections{""};
  std::vector<std::pair<Field, std::string>> fields;
  const auto has_settings = [&](const std::string& path) {
    return std::ranges::any_of(options_, [&](const Option& option) { return option.path.starts_with(path + "."); });
  };
  Visitor collect([&](const Field& field, const FieldValue& value) {
    if (!field.applies) return;
    std::string path(field.name);
    const std::string origin = origins[path];
    if (has_settings(path)) path += kType;
    const std::string section(section_of(path));
    const std::string name = section.empty() ? path : path.substr(section.size() + 1);
    if (std::ranges::find(sections, section) == sections.end()) sections.push_back(section);
    lines.emplace_back(section, fmt::format("{:<48}  # {}\n", fmt::format("{} = {}", name, toml_value(value)), origin));
  });
  describe_(collect);
  std::string text;
  for (const std::string& section : sections) {
    if (!section.empty()) text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
    for (const auto& [of, line] : lines) {
      if (of == section) text += line;
    }
  }
  return text;
}

std::vector<Setting> settings_of(const EnvironmentVariables& variables) {
  constexpr std::string_view kPrefix = "FULGUR_", kDot = "__";
  std::vector<Setting> settings;
  for (const auto& [name, value] : variables) {
    if (!name.starts_with(kPrefix) || name.find(kDot) == std::string::npos) continue;
    const std::string words = canonical_name(std::string_view(name).substr(kPrefix.size()));
    std::string path;
    for (size_t i = words.starts_with('_') ? 1 : 0; i < words.size(); ++i) {  // one '_' is left of FULGUR__SEED's two
      const bool ends_section = words.compare(i, kDot.size(), kDot) == 0;
      path += ends_section ? '.' : words[i];
      if (ends_section) ++i;
    }
    settings.push_back({.path = path, .text = value, .origin = name, .name = name});
  }
  return settings;
}

}  // namespace fulgur
