#pragma once

#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/state.h"

namespace fulgur {
namespace internal {

class FieldReader final : public FieldVisitor {
 public:
  void operator()(const Field& field, FieldValue value) override;
  State state;
};

class FieldWriter final : public FieldVisitor {
 public:
  explicit FieldWriter(const State& state) : unread_(state) {}
  void operator()(const Field& field, FieldValue value) override;
  void check_all_read() const;

 private:
  State unread_;
  std::vector<std::string> known_;
};

}  // namespace internal

// A value as text that a field can be set from. Throws UsageError for a tensor.
std::string text_of_value(const State::Value& value);

// The fields of an options struct by name: numbers and booleans as such, everything else as text ("none" if unset).
template <class Options>
State fields_to_state(Options options) {
  internal::FieldReader reader;
  options.describe(reader);
  return reader.state;
}

// Sets the fields from `state`; fields that are not in `state` keep their values. Throws UsageError for a value that
// the field cannot have, or a name that no field has, with the nearest one.
template <class Options>
void set_fields(Options& options, const State& state) {
  internal::FieldWriter writer(state);
  options.describe(writer);
  writer.check_all_read();
}

}  // namespace fulgur
