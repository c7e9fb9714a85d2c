#include "fulgur/base/toml_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

// toml++ 3.3.0 asserts on some broken files, such as "[[)x]]", which it would refuse in the next line.
#define TOML_ASSERT(expr) static_assert(true)
#include <toml++/toml.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <system_error>
#include <tuple>
#include <utility>

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInclude = "include";

// Reads one file, and those that it includes.
class Reader {
 public:
  Reader(std::vector<Setting>& settings, std::vector<std::string>& problems)
      : settings_(settings), problems_(problems) {}

  // `asked_at`: where the file is named, for messages; empty: on the command line.
  void read(const fs::path& file, const std::string& asked_at) {
    std::error_code error;
    const fs::path whole = fs::weakly_canonical(file, error);
    const std::string at = asked_at.empty() ? "--config" : asked_at;
    if (const auto first = std::ranges::find(open_, whole); first != open_.end()) {
      std::vector<std::string> circle;
      for (auto name = first; name != open_.end(); ++name) circle.push_back(name->filename().string());
      return refuse(at, fmt::format("'{}' includes itself: {} -> {}", file.string(), fmt::join(circle, " -> "),
                                    whole.filename().string()));
    }
    if (!fs::is_regular_file(file, error)) return refuse(at, fmt::format("there is no file '{}'", file.string()));
    std::ifstream stream(file, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) return refuse(at, fmt::format("'{}' cannot be read", file.string()));
    open_.push_back(whole);
    parse(text, file);
    open_.pop_back();
  }

  void parse(std::string_view text, const fs::path& file) try {
    const toml::table root = toml::parse(text, file.string());
    if (const toml::node* include = root.get(kInclude)) read_included(file, *include);
    add_table(file, root);
  } catch (const toml::parse_error& error) {
    const std::string at = place(file, error.source());
    refuse(at, fmt::format("this is no TOML: {}", error.description()));
  }

 private:
  void read_included(const fs::path& file, const toml::node& include) {
    const std::string at = place(file, include.source());
    const auto read_one = [&](const toml::node& node) {
      const auto name = node.value_exact<std::string>();
      if (!name) return refuse(at, "include must be a file name or a list of them");
      read(file.parent_path() / *name, at);
    };
    if (const toml::array* names = include.as_array()) {
      for (const toml::node& name : *names) read_one(name);
    } else {
      read_one(include);
    }
  }

  // A value, or where an element of a list begins, or a section without an option.
  struct Value {
    std::string path;
    std::optional<Setting::Element> element;
    const toml::node* node;
  };

  // Adds the values in the order of the file, so that messages come in that order.
  void add_table(const fs::path& file, const toml::table& root) {
    std::vector<Value> values;
    collect(root, {.path = "", .element = std::nullopt, .node = nullptr}, values);
    std::ranges::stable_sort(values, [](const Value& a, const Value& b) {
      const toml::source_position &at = a.node->source().begin, &other = b.node->source().begin;
      return std::tie(at.line, at.column) < std::tie(other.line, other.column);
    });
    for (const Value& value : values) {
      const bool begins = value.element && value.element->begins;
      const std::string name = value.element ? value.element->key : value.path;
      settings_.push_back({.path = value.path,
                           .text = begins ? "" : text_of(*value.node),
                           .origin = place(file, value.node->source()),
                           .name = name,
                           .element = value.element,
                           .form = form_of(*value.node)});
    }
  }

  // Appends the values of `table`, which is at `place`.
  static void collect(const toml::table& table, const Value& place, std::vector<Value>& values) {
    for (const auto& [key, node] : table) {
      if (place.path.empty() && key.str() == kInclude) continue;
      Value value = place;
      std::string& name = value.element ? value.element->key : value.path;
      name += fmt::format("{}{}", name.empty() ? "" : ".", key.str());
      value.node = &node;
      const toml::array* list = node.as_array();
      if (const toml::table* inner = node.as_table(); inner != nullptr && !inner->empty()) {
        collect(*inner, value, values);
      } else if (list != nullptr && list->is_array_of_tables() && !value.element) {
        for (size_t i = 0; i < list->size(); ++i) {
          const Value element{
              .path = value.path, .element = Setting::Element{i, "", /*begins=*/true}, .node = &(*list)[i]};
          values.push_back(element);
          Value within = element;
          within.element->begins = false;
          collect(*element.node->as_table(), within, values);
        }
      } else {
        values.push_back(value);
      }
    }
  }

  static Setting::Form form_of(const toml::node& node) {
    using Form = Setting::Form;
    if (node.is_string()) return Form::quoted;
    if (node.is_floating_point()) return Form::real;
    if (const toml::array* list = node.as_array(); list != nullptr && list->empty()) return Form::empty_list;
    const toml::table* table = node.as_table();
    return table != nullptr && table->empty() ? Form::empty_table : Form::any;
  }

  static std::optional<std::string> text_of(const toml::node& node) {
    if (const auto text = node.value_exact<std::string>()) return *text;
    if (const auto whole = node.value_exact<int64_t>()) return fmt::format("{}", *whole);
    if (const auto real = node.value_exact<double>()) return text_of_real(*real);
    if (const auto flag = node.value_exact<bool>()) return *flag ? "true" : "false";
    const toml::array* list = node.as_array();
    if (list == nullptr) return std::nullopt;
    std::vector<std::string> elements;
    for (const toml::node& element : *list) {
      const auto text = element.is_array() ? std::nullopt : text_of(element);
      if (!text || text->empty() || text->find(',') != std::string::npos) return std::nullopt;
      elements.push_back(*text);
    }
    return fmt::format("{}", fmt::join(elements, ","));
  }

  // 1.0 stays different from the count 1.
  static std::string text_of_real(double real) {
    const std::string text = fmt::format("{}", real);
    return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
  }

  static std::string place(const fs::path& file, const toml::source_region& source) {
    return fmt::format("{}:{}:{}", file.string(), source.begin.line, source.begin.column);
  }

  void refuse(const std::string& where, const std::string& what) {
    problems_.push_back(fmt::format("{}: {}", where, what));
  }

  std::vector<Setting>& settings_;
  std::vector<std::string>& problems_;
  std::vector<fs::path> open_{};  // the files that include one another, up to the one that is being read
};

}  // namespace

void read_toml(const fs::path& file, std::vector<Setting>& settings, std::vector<std::string>& problems) {
  Reader(settings, problems).read(file, "");
}

void read_toml_text(std::string_view text, const fs::path& name, std::vector<Setting>& settings,
                    std::vector<std::string>& problems) {
  Reader(settings, problems).parse(text, name);
}

std::map<std::string, std::string> read_toml_values(const fs::path& file, std::vector<std::string>& problems) {
  std::vector<Setting> settings;
  read_toml(file, settings, problems);
  std::map<std::string, std::string> values;
  for (const Setting& setting : settings) {
    const auto& element = setting.element;
    if (element && element->begins) continue;
    const std::string name =
        element ? fmt::format("{}[{}].{}", setting.path, element->index, element->key) : setting.path;
    values[name] = setting.text.value_or("");
  }
  return values;
}

std::string toml_string(const std::string& text) {
  using toml::toml_formatter;
  const toml::value<std::string> value(text);
  std::ostringstream out;
  out << toml_formatter(value, toml_formatter::default_flags & ~toml::format_flags::allow_literal_strings);
  return out.str();
}

}  // namespace fulgur
