#include "fulgur/base/field_state.h"

#include <fmt/format.h>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

std::string text_of(const State::Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<int64_t>(&value)) return fmt::format("{}", *number);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{}", *number);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  throw UsageError("a tensor is no setting");
}

}  // namespace

void internal::FieldReader::operator()(const Field& field, FieldValue value) {
  if (const auto* flag = std::get_if<bool*>(&value)) {
    state.set(field.name, **flag);
  } else if (const auto* whole = std::get_if<int64_t*>(&value)) {
    state.set(field.name, **whole);
  } else if (const auto* number = std::get_if<double*>(&value)) {
    state.set(field.name, **number);
  } else if (const auto* small = std::get_if<int*>(&value)) {
    state.set(field.name, int64_t{**small});
  } else if (const auto* single = std::get_if<float*>(&value)) {
    state.set(field.name, double{**single});
  } else if (const auto* whole_or_none = std::get_if<std::optional<int64_t>*>(&value);
             whole_or_none && **whole_or_none) {
    state.set(field.name, ***whole_or_none);
  } else if (const auto* flag_or_none = std::get_if<std::optional<bool>*>(&value); flag_or_none && **flag_or_none) {
    state.set(field.name, ***flag_or_none);
  } else {
    state.set(field.name, field_text(value));
  }
}

void internal::FieldWriter::operator()(const Field& field, FieldValue value) {
  known_.emplace_back(field.name);
  const auto& values = unread_.values();
  const auto saved = values.find(field.name);
  if (saved == values.end()) return;
  set_field(field, value, text_of(saved->second));
  unread_.erase(field.name);
}

void internal::FieldWriter::check_all_read() const {
  if (unread_.empty()) return;
  throw UsageError(unknown_name_message("setting", unread_.values().begin()->first, known_));
}

}  // namespace fulgur
