#include "fulgur/base/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;  // clang before 17, which tools/fuzz uses, does not deduce it

template <class Number>
Number parse_number(const Field& field, std::string_view text, std::string_view kind) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range) {
    throw UsageError(fmt::format("{}: '{}' is out of range", field.name, text));
  }
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw UsageError(fmt::format("{}: '{}' is not {}", field.name, text, kind));
  }
  return number;
}

bool parse_bool(const Field& field, std::string_view text) {
  const std::string word = canonical_name(text);
  if (word == "true" || word == "1" || word == "yes" || word == "on") return true;
  if (word == "false" || word == "0" || word == "no" || word == "off") return false;
  throw UsageError(fmt::format("{}: '{}' is not true or false", field.name, text));
}

template <class Number>
void check_number(const Field& field, Number value) {
  const auto x = static_cast<double>(value);
  if (!(x >= field.min)) throw UsageError(fmt::format("{} must be at least {}; got {}", field.name, field.min, value));
  if (!(x <= field.max)) throw UsageError(fmt::format("{} must be at most {}; got {}", field.name, field.max, value));
}

std::optional<size_t> find_choice(const std::vector<std::string>& choices, std::string_view value) {
  const auto same = [&](const std::string& choice) { return canonical_name(choice) == canonical_name(value); };
  const auto found = std::ranges::find_if(choices, same);
  if (found == choices.end()) return std::nullopt;
  return static_cast<size_t>(found - choices.begin());
}

bool is_none(std::string_view text) { return canonical_name(text) == "none"; }

void check_choice(const Field& field, const std::string& value) {
  if (field.choices.empty() || find_choice(field.choices, value)) return;
  throw UsageError(unknown_name_message(field.name, value, field.choices));
}

}  // namespace

void set_field(const Field& field, const FieldValue& value, std::string_view text) {
  std::visit(Overloaded{[&](bool* target) { *target = parse_bool(field, text); },
                        [&](int64_t* target) { *target = parse_number<int64_t>(field, text, "a whole number"); },
                        [&](double* target) { *target = parse_number<double>(field, text, "a number"); },
                        [&](int* target) { *target = parse_number<int>(field, text, "a whole number"); },
                        [&](float* target) { *target = parse_number<float>(field, text, "a number"); },
                        [&](std::string* target) { *target = text; },
                        [&](const TextField& target) { internal::with_name(field.name, [&] { target.set(text); }); },
                        [&]<class T>(std::optional<T>* target) {
                          if (is_none(text)) return target->reset();
                          T read{};
                          set_field(field, &read, text);
                          *target = read;
                        }},
             value);
  check_field(field, value);
}

std::string field_text(const FieldValue& value) {
  return std::visit(
      Overloaded{
          [](const bool* source) { return std::string(*source ? "true" : "false"); },
          [](const std::string* source) { return *source; }, [](const TextField& source) { return source.get(); },
          []<class T>(std::optional<T>* source) { return *source ? field_text(&**source) : std::string("none"); },
          [](const auto* source) { return fmt::format("{}", *source); }},
      value);
}

void check_field(const Field& field, const FieldValue& value) {
  std::visit(Overloaded{[](bool*) {}, [&](int64_t* source) { check_number(field, *source); },
                        [&](double* source) { check_number(field, *source); },
                        [&](int* source) { check_number(field, *source); },
                        [&](float* source) { check_number(field, *source); },
                        [&](std::string* source) { check_choice(field, *source); },
                        [&](const TextField& source) {
                          if (source.check) source.check(field.name);
                        },
                        [&]<class T>(std::optional<T>* source) {
                          if (*source) check_field(field, &**source);
                        }},
             value);
}

namespace internal {

void with_name(std::string_view name, const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}", name, error.what()));
  }
}

void check_is_pair(size_t num_elements) {
  if (num_elements != 2) throw UsageError(fmt::format("this is a pair, such as 0.9,0.95; got {} values", num_elements));
}

TextField text_field(const Field&, uint64_t* value) {
  const auto set = [value](std::string_view text) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (error == std::errc{} && end == text.data() + text.size()) return;
    throw UsageError(
        fmt::format("'{}' is not a whole number from 0 to {}", text, std::numeric_limits<uint64_t>::max()));
  };
  return {.set = set, .get = [value] { return fmt::format("{}", *value); }};
}

std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(','), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

size_t enum_value_of(const std::vector<std::string>& choices, std::string_view name) {
  if (const auto choice = find_choice(choices, name)) return *choice;
  throw UsageError(unknown_name_message("value", name, choices));
}

std::string enum_name_of(const std::vector<std::string>& choices, size_t value) {
  if (value < choices.size()) return choices[value];
  throw UsageError(
      fmt::format("the value {} has no name; choices must name every value of the enum, from 0 on", value));
}

std::string text_of_element(const Field& element, const FieldValue& value) {
  std::string text = field_text(value);
  if (!text.empty() && text.find(',') == std::string::npos) return text;
  throw UsageError(
      fmt::format("{} is '{}', but the elements of a list can neither be empty nor have a comma", element.name, text));
}

Field element_of(const Field& field, const std::string& name) {
  return {.name = name, .min = field.min, .max = field.max, .choices = field.choices};
}

}  // namespace internal

void internal::FieldChecker::operator()(const Field& field, FieldValue value) {
  try {
    check_field(field, value);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}", owner_, error.what()));
  }
}

void internal::SectionVisitor::operator()(const Field& field, FieldValue value) {
  Field of_section = field;
  const std::string path = fmt::format("{}.{}", section_, field.name);
  of_section.name = path;
  visit_(of_section, std::move(value));
}

void internal::SectionVisitor::list(const Field& field, const ObjectList& objects) {
  Field of_section = field;
  const std::string path = fmt::format("{}.{}", section_, field.name);
  of_section.name = path;
  visit_.list(of_section, objects);
}

void internal::FieldTexts::operator()(const Field& field, FieldValue value) {
  texts_.emplace_back(field.name, field_text(value));
}

std::string internal::FieldTexts::without(const FieldTexts& others) const {
  std::string text;
  for (const auto& field : texts_) {
    if (std::ranges::count(others.texts_, field) > 0) continue;
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", field.first, field.second);
  }
  return text;
}

}  // namespace fulgur
