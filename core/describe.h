#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace fulgur {

// A setting that is written as text: "auto", "2", "0,1".
struct TextField {
  std::function<void(std::string_view)> set;  // throws UsageError
  std::function<std::string()> get;
};

// An optional is unset by the word none.
using FieldValue =
    std::variant<bool*, int64_t*, double*, std::string*, TextField, std::optional<bool>*, std::optional<int64_t>*>;

// What is known of a field besides its value.
struct Field {
  std::string_view name{};                                // as in the struct
  std::string_view help{};                                // one clause; shapes and units here
  double min = -std::numeric_limits<double>::infinity();  // numbers only, inclusive
  double max = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices{};  // strings only; empty: any
};

// Walks over the fields of an options struct. The struct names each field once:
//   struct SGDOptions {
//     double lr = 1e-3;
//     void describe(FieldVisitor& visit) { visit({.name = "lr", .help = "learning rate", .min = 0}, &lr); }
//   };
// and flags, --help and the checks of values all come from that.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void operator()(const Field& field, FieldValue value) = 0;
};

// Sets the field from text, such as a flag's. Throws UsageError: "lr: 'fast' is not a number".
void set_field(const Field& field, const FieldValue& value, std::string_view text);

std::string field_text(const FieldValue& value);  // the value as set_field takes it

// Throws UsageError if the value is outside min and max or is not one of the choices.
void check_field(const Field& field, const FieldValue& value);

namespace internal {

class FieldChecker final : public FieldVisitor {
 public:
  explicit FieldChecker(std::string_view owner) : owner_(owner) {}
  void operator()(const Field& field, FieldValue value) override;

 private:
  std::string_view owner_;
};

}  // namespace internal

// Checks every field of an options struct; `owner` begins the message: "AdamW: lr must be at least 0; got -1".
template <class Options>
void check_fields(std::string_view owner, Options options) {
  internal::FieldChecker checker(owner);
  options.describe(checker);
}

}  // namespace fulgur
