#include "fulgur/base/field_state.h"

#include <fmt/format.h>

#include <type_traits>
#include <variant>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

// The number in the widest type of its kind.
template <class Number>
State::Value value_of(Number number) {
  if constexpr (std::is_same_v<Number, bool>) {
    return number;
  } else if constexpr (std::is_integral_v<Number>) {
    return int64_t{number};
  } else {
    return double{number};
  }
}

}  // namespace

std::string text_of_value(const State::Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<int64_t>(&value)) return fmt::format("{}", *number);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{}", *number);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  throw UsageError("a tensor is no setting");
}

void internal::FieldReader::operator()(const Field& field, FieldValue value) {
  state.set(field.name, std::visit(Overloaded{[](const std::string* source) { return State::Value(*source); },
                                              [](const TextField& source) { return State::Value(source.get()); },
                                              []<class Number>(std::optional<Number>* source) {
                                                return *source ? value_of(**source) : State::Value(std::string("none"));
                                              },
                                              [](const auto* source) { return value_of(*source); }},
                                   value));
}

void internal::FieldWriter::operator()(const Field& field, FieldValue value) {
  known_.emplace_back(field.name);
  const auto& values = unread_.values();
  const auto saved = values.find(field.name);
  if (saved == values.end()) return;
  set_field(field, value, text_of_value(saved->second));
  unread_.erase(field.name);
}

void internal::FieldWriter::check_all_read() const {
  if (unread_.empty()) return;
  throw UsageError(unknown_name_message("setting", unread_.values().begin()->first, known_));
}

}  // namespace fulgur
