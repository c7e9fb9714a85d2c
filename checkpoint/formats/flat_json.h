#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>

#include "fulgur/checkpoint/limits.h"

namespace fulgur {

// Refers to a tensor that is stored elsewhere under this name.
struct TensorReference {
  std::string name;
  bool operator==(const TensorReference&) const = default;
};

// Values by name, as state.json holds them.
using FlatValue = std::variant<bool, int64_t, double, std::string, TensorReference>;
using FlatValues = std::map<std::string, FlatValue, std::less<>>;

// A JSON object with one name per line, sorted. Numbers keep their type (2.0 is a double, 2 is not) and every bit,
// except for the payload of a NaN. Values that JSON cannot express are objects: {"double": "nan"}, {"double": "-inf"},
// {"hex": "ff00"} for a string that is not UTF-8, {"tensor": "name"}. Throws CheckpointError for a name that is not
// UTF-8, or more than `max_values`.
std::string to_flat_json(const FlatValues& values, int64_t max_values = limits::kJsonValues);

// Throws CheckpointError, naming `file`, the value and the reason, for anything that to_flat_json() would not write.
FlatValues parse_flat_json(std::string_view text, std::string_view file, int64_t max_values = limits::kJsonValues);

}  // namespace fulgur
