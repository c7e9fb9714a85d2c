#include "fulgur/cli/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/toml_file.h"

namespace fulgur {
namespace {

constexpr std::string_view kTrainer = "trainer.";
constexpr std::string_view kType = ".type";      // strategy.type is what strategy names
constexpr std::string_view kPrefix = "FULGUR_";  // environment variables begin with it
constexpr std::string_view kDot = "__";          // a dot in the name of an environment variable

// The variables that something in fulgur's tree reads: the library, its build, its tools or its tests. They mean no
// option, whatever names the options of a program have. tests/cli/own_variables_test.py compares the list with the
// tree.
constexpr std::string_view kOwnVariables[] = {
    "FULGUR_CUDA",          "FULGUR_DOCTOR_RANKS",  "FULGUR_FAULT_RUN", "FULGUR_HOST_ID",     "FULGUR_HOST_MEMORY_GIB",
    "FULGUR_LIBTORCH",      "FULGUR_PARENT_PID",    "FULGUR_PREDICT",   "FULGUR_RANK_OUTPUT", "FULGUR_REPOSITORY",
    "FULGUR_SHARED_MEMORY", "FULGUR_SOCKET_IFNAME", "FULGUR_TRACE"};

// A FieldVisitor that calls functions.
class Visitor final : public FieldVisitor {
 public:
  using Visit = std::function<void(const Field&, const FieldValue&)>;
  using VisitList = std::function<void(const Field&, const ObjectList&)>;
  explicit Visitor(Visit visit, VisitList visit_list = {})
      : visit_(std::move(visit)), visit_list_(std::move(visit_list)) {}
  void operator()(const Field& field, FieldValue value) override { visit_(field, value); }
  void list(const Field& field, const ObjectList& objects) override {
    if (visit_list_) visit_list_(field, objects);
  }

 private:
  Visit visit_;
  VisitList visit_list_;
};

// `path` with `dot` in place of each dot.
std::string with_dots_as(std::string_view path, std::string_view dot) {
  std::string text;
  for (const char c : path) c == '.' ? text += dot : text += c;
  return text;
}

std::string variable_of(std::string_view path) {
  std::string name(kPrefix);
  if (path.find('.') == std::string_view::npos) name += '_';  // FULGUR__SEED
  for (const char c : with_dots_as(path, kDot)) name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// What a value of a number or a flag is called; empty for values that are text.
std::string_view kind_of(const FieldValue& value) {
  constexpr std::string_view kNames[] = {"true or false", "a whole number", "a number",       "",         "",
                                         "true or false", "a whole number", "a whole number", "a number", "a number"};
  static_assert(std::size(kNames) == std::variant_size_v<FieldValue>);
  return kNames[value.index()];
}

// The option or list with this path, or with this path in the section of the trainer; null: there is none.
template <class Entries>
auto find_in(Entries& entries, std::string_view path) -> decltype(&*entries.begin()) {
  for (const std::string& wanted : {canonical_name(path), canonical_name(std::string(kTrainer) + std::string(path))}) {
    const auto found = std::ranges::find_if(entries, [&](const auto& e) { return canonical_name(e.path) == wanted; });
    if (found != entries.end()) return &*found;
  }
  return nullptr;
}

std::string toml_value(const FieldValue& value) {
  const std::string text = field_text(value);
  const bool is_plain = !kind_of(value).empty() && text != "none";
  return is_plain ? text : toml_string(text);
}

// The problem with its origin in front, unless the origin is the name that the problem gives anyway.
std::string at(const std::string& origin, const std::string& name, std::string_view problem) {
  return origin == name ? std::string(problem) : fmt::format("{}: {}", origin, problem);
}

// "trainer" of "trainer.max_epochs"; empty for an option outside of sections.
std::string_view section_of(std::string_view path) {
  const size_t end = path.rfind('.');
  return end == std::string_view::npos ? std::string_view() : path.substr(0, end);
}

}  // namespace

Config::Config(DescribeFields describe) : describe_(std::move(describe)) {
  Visitor collect(
      [this](const Field& field, const FieldValue& value) {
        Option& option = options_.emplace_back(Option{.field = field,
                                                      .value = value,
                                                      .path = std::string(field.name),
                                                      .help = std::string(field.help),
                                                      .unit = std::string(field.unit)});
        option.field.name = option.path;
        option.field.help = option.help;
        option.field.unit = option.unit;
      },
      [this](const Field& field, const ObjectList& objects) {
        lists_.push_back({.path = std::string(field.name), .objects = objects});
      });
  describe_(collect);
}

Config::Option* Config::find(std::string_view path) {
  if (Option* option = find_in(options_, path)) return option;
  const std::string wanted = canonical_name(path);
  if (!wanted.ends_with(kType)) return nullptr;
  return find_in(options_, std::string_view(wanted).substr(0, wanted.size() - kType.size()));
}

std::string Config::flag_of(const Option& option) const {
  if (!option.path.starts_with(kTrainer)) return option.path;
  const std::string name = option.path.substr(kTrainer.size());
  const bool is_taken = std::ranges::any_of(options_, [&](const Option& other) { return other.path == name; });
  return is_taken ? option.path : name;
}

std::string Config::advice_for(std::string_view path) const {
  constexpr size_t kMostNames = 12;
  if (find_in(lists_, path) != nullptr) return fmt::format("it is a list; write [[{}]] in a file for --config", path);
  const std::string wanted = canonical_name(path), section = canonical_name(section_of(path));
  std::vector<std::string> of_section, all;
  for (const Option& option : options_) {
    all.push_back(flag_of(option));
    if (has_section(option.path)) all.push_back(flag_of(option) + std::string(kType));
    if (!section.empty() && canonical_name(section_of(option.path)) == section) of_section.push_back(option.path);
    const std::string_view name = std::string_view(option.path).substr(option.path.rfind('.') + 1);
    if (canonical_name(name) == wanted) return fmt::format("did you mean '{}'?", flag_of(option));
  }
  for (const List& list : lists_) {
    all.push_back(list.path.starts_with(kTrainer) ? list.path.substr(kTrainer.size()) : list.path);
  }
  if (const auto nearest = nearest_name(path, of_section.empty() ? all : of_section)) {
    return fmt::format("did you mean '{}'?", *nearest);
  }
  if (of_section.empty() || of_section.size() > kMostNames) return "--help=all lists all";
  return fmt::format("there are {}", fmt::join(of_section, ", "));
}

// Whether there are options in a section, or in this one of the trainer.
bool Config::has_section(std::string_view path) const {
  const std::string begin = canonical_name(path) + ".", of_trainer = std::string(kTrainer) + begin;
  return std::ranges::any_of(options_, [&](const Option& option) {
    const std::string name = canonical_name(option.path);
    return name.starts_with(begin) || name.starts_with(of_trainer);
  });
}

std::string Config::why_unknown(std::string_view path) {
  for (const std::string_view list : {path, section_of(path)}) {
    if (find_in(lists_, list) != nullptr) return fmt::format("{0} is a list of tables; write [[{0}]]", list);
  }
  if (has_section(path)) return fmt::format("{0} is a section; write [{0}]", path);
  const Option* outer = section_of(path).empty() ? nullptr : find(section_of(path));
  const auto is_beside = [&](const Option& option) { return option.path.starts_with(outer->path + "."); };
  if (outer != nullptr && std::ranges::none_of(options_, is_beside)) {
    return fmt::format("{} is one value, not a table", section_of(path));
  }
  return fmt::format("unknown option '{}'; {}", path, advice_for(path));
}

void Config::set(std::span<const Setting> settings, std::vector<std::string>& problems) {
  const auto refuse = [&](const Setting& setting, const std::string& what) {
    problems.push_back(at(setting.origin, setting.name, what));
  };
  for (const Setting& setting : settings) {
    List* list = find_in(lists_, setting.path);
    if (list != nullptr && setting.element) {
      const std::string other = list->add(setting);
      if (!other.empty()) refuse(setting, fmt::format("{} and {} are the same list; write one", other, setting.path));
      continue;
    }
    if (list != nullptr && setting.form == Setting::Form::empty_list) {
      list->elements.clear();
      continue;
    }
    if (setting.element && !setting.element->begins) continue;  // the list is unknown, and was refused
    if (setting.form == Setting::Form::empty_table && !setting.element && has_section(setting.path)) continue;
    Option* option = find(setting.path);
    if (option == nullptr) {
      problems.push_back(fmt::format("{}: {}", setting.origin, why_unknown(setting.path)));
      continue;
    }
    if (setting.element) {
      refuse(setting, setting.path + " is one value, not a list of tables");
      continue;
    }
    if (!setting.text) {
      refuse(setting, setting.name +
                          " must be text, a number, true or false, or a list of these, of which none is empty "
                          "or has a comma");
      continue;
    }
    const std::string_view kind = kind_of(option->value);
    if (setting.form == Setting::Form::quoted && !kind.empty() && canonical_name(*setting.text) != "none") {
      refuse(setting, fmt::format("{} must be {}; got the text \"{}\"", setting.name, kind, *setting.text));
      continue;
    }
    if (setting.form == Setting::Form::real && std::holds_alternative<std::string*>(option->value)) {
      refuse(setting, fmt::format("{} is text; write it in quotes", setting.name));
      continue;
    }
    Field field = option->field;
    field.name = setting.name;
    try {
      set_field(field, option->value, *setting.text);
      option->origin = setting.origin;
      option->name = setting.name;
    } catch (const UsageError& error) {
      refuse(setting, error.what());
    }
  }
}

void Config::fill(std::span<const Setting> settings, std::vector<std::string>& problems) {
  for (const Setting& setting : settings) {
    const Option* option = find(setting.path);
    if (option == nullptr || option->is_default()) set({&setting, 1}, problems);
  }
}

void Config::check(std::vector<std::string>& problems) {
  Visitor look([&](const Field& field, const FieldValue& value) {
    const auto option = std::ranges::find(options_, field.name, &Option::path);
    if (option->is_default()) return;
    if (!field.applies) {
      const Option* choice = section_of(field.name).empty() ? nullptr : find(section_of(field.name));
      const std::string chosen = choice == nullptr
                                     ? "what was chosen"
                                     : fmt::format("{} is {}, which", flag_of(*choice), field_text(choice->value));
      const std::string instead =
          choice == nullptr || field.used_by.empty()
              ? ""
              : fmt::format("; leave it out, or write {} = {}", flag_of(*choice), fmt::join(field.used_by, ", or "));
      problems.push_back(at(option->origin, option->name,
                            fmt::format("{} is set, but {} does not use it{}", option->name, chosen, instead)));
      return;
    }
    Field named = field;
    named.name = option->name;
    try {
      check_field(named, value);
    } catch (const UsageError& error) {
      problems.push_back(at(option->origin, option->name, error.what()));
    }
  });
  describe_(look);
}

// A list starts over with each file that has it. If the same file already has the list under another name, returns that
// name.
std::string Config::List::add(const Setting& setting) {
  const auto& [index, key, begins] = *setting.element;
  if (begins && index == 0) {
    const auto file_of = [](const std::string& origin) {  // without line and column
      return origin.substr(0, origin.rfind(':', origin.rfind(':') - 1));
    };
    const bool is_twice =
        !elements.empty() && named_as != setting.path && file_of(elements.front().origin) == file_of(setting.origin);
    if (is_twice) return named_as;
    elements.clear();
    named_as = setting.path;
  }
  if (begins) {
    elements.push_back({.origin = setting.origin});
  } else if (!objects.types.empty() && canonical_name(key) == "type") {
    elements.back().type = setting;
  } else {
    Setting& option = elements.back().settings.emplace_back(setting);
    option.path = key;
    option.element.reset();
  }
  return "";
}

void Config::make_objects(std::vector<std::string>& problems) {
  for (List& list : lists_) {
    for (Element& element : list.elements) make_draft(list, element, problems);
  }
  if (!problems.empty()) return;
  for (List& list : lists_) {
    for (Element& element : list.elements) {
      try {
        element.draft->add();
      } catch (const UsageError& error) {
        problems.push_back(fmt::format("{}: {}", element.origin, error.what()));
      }
    }
  }
}

void Config::make_draft(const List& list, Element& element, std::vector<std::string>& problems) {
  const std::vector<std::string>& types = list.objects.types;
  if (!types.empty() && (!element.type || !element.type->text)) {
    problems.push_back(fmt::format("{}: {} needs a type, such as type = \"{}\"", element.origin, list.path, types[0]));
    return;
  }
  try {
    element.draft = list.objects.begin(types.empty() ? "" : *element.type->text);
  } catch (const UsageError& error) {
    problems.push_back(fmt::format("{}: {}", element.type->origin, error.what()));
    return;
  }
  element.options = std::make_unique<Config>([&draft = *element.draft](FieldVisitor& visit) { draft.describe(visit); });
  element.options->set(element.settings, problems);
}

// Options outside of sections come first, as TOML wants it. An option that has settings of its own, such as strategy,
// becomes a section with a `type`. Settings of what was not chosen are left out.
std::string Config::to_toml_of(const std::string& table) const {
  const std::string prefix = table.empty() ? "" : table + ".";
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
    if (!section.empty()) text += fmt::format("{}[{}{}]\n", text.empty() && table.empty() ? "" : "\n", prefix, section);
    for (const auto& [of, line] : lines) {
      if (of == section) text += line;
    }
  }
  for (const List& list : lists_) {
    const std::string path = prefix + list.path;
    for (const Element& element : list.elements) {
      text += fmt::format("\n[[{}]]\n", path);
      if (element.type) {
        const std::string type = fmt::format("type = {}", toml_string(element.type->text.value_or("")));
        text += fmt::format("{:<48}  # {}\n", type, element.type->origin);
      }
      text += element.options->to_toml_of(path);  // [path.section] means the element that began last
    }
  }
  return text;
}

std::vector<Setting> settings_of(const EnvironmentVariables& variables) {
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

void refuse_variables_without_dots(const EnvironmentVariables& variables, const Config& config,
                                   std::vector<std::string>& problems) {
  for (const auto& [name, value] : variables) {
    if (!name.starts_with(kPrefix) || std::ranges::find(kOwnVariables, name) != std::end(kOwnVariables)) continue;
    const std::string words = canonical_name(std::string_view(name).substr(kPrefix.size()));
    const auto is_meant = [&](std::string_view path) { return words == canonical_name(with_dots_as(path, "_")); };
    for (const Config::Option& option : config.options()) {
      if (!is_meant(option.path) && !is_meant(config.flag_of(option))) continue;
      problems.push_back(fmt::format("{}: the variable of {} is {}", name, option.path, variable_of(option.path)));
    }
  }
}

}  // namespace fulgur
