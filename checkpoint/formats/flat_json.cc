#include "fulgur/checkpoint/formats/flat_json.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur {
namespace {

using Json = nlohmann::json;

constexpr std::pair<std::string_view, double> kNotNumbers[] = {{"nan", std::numeric_limits<double>::quiet_NaN()},
                                                               {"inf", std::numeric_limits<double>::infinity()},
                                                               {"-inf", -std::numeric_limits<double>::infinity()}};

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::strict); }

std::string to_json(double value) {
  if (std::isnan(value)) return dump({{"double", "nan"}});
  if (std::isinf(value)) return dump({{"double", value > 0 ? "inf" : "-inf"}});
  return dump(value);  // the shortest text that reads back as the same value, with ".0" or an exponent
}

std::string to_json(const std::string& text) {
  try {
    return dump(text);
  } catch (const Json::type_error&) {  // not UTF-8
    std::string hex;
    for (const unsigned char byte : text) hex += fmt::format("{:02x}", byte);
    return dump({{"hex", hex}});
  }
}

std::string to_json(bool value) { return value ? "true" : "false"; }
std::string to_json(int64_t value) { return fmt::format("{}", value); }
std::string to_json(const TensorReference& tensor) { return dump({{"tensor", tensor.name}}); }

std::string bytes_of_hex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    unsigned char byte = 0;
    const auto [end, error] = std::from_chars(hex.data() + i, hex.data() + std::min(i + 2, hex.size()), byte, 16);
    if (error != std::errc() || end != hex.data() + i + 2) throw BadJson(quote(hex) + " is not hexadecimal");
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

double not_number(std::string_view text) {
  for (const auto& [name, value] : kNotNumbers) {
    if (name == text) return value;
  }
  throw BadJson(quote(text) + " is none of nan, inf, -inf");
}

FlatValue special_value(std::string_view kind, const std::string& text) {
  if (kind == "double") return not_number(text);
  if (kind == "hex") return bytes_of_hex(text);
  if (kind == "tensor") return TensorReference{text};
  throw BadJson(fmt::format("{} is none of double, hex, tensor", quote(kind)));
}

class FlatReader : public JsonEvents {
 public:
  FlatReader(FlatValues& values, int64_t max_values) : values_(values), max_values_(max_values) {}

  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(int64_t{value}); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return unexpected("an integer beyond 2^63");
    return add(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    // The decimal point is that of the process's locale.
    if (text.find_first_not_of("-0123456789") == text.npos) return unexpected("an integer beyond 2^63");
    return add(value);
  }
  bool string(string_t& text) override {
    if (place_ != Place::kSpecial) return add(std::move(text));
    if (kind_.empty()) return unexpected("a text");
    values_.emplace(name_, special_value(kind_, text));
    place_ = Place::kSpecialEnd;
    return true;
  }
  bool start_object(size_t) override {
    if (place_ != Place::kStart && place_ != Place::kValue) return unexpected("an object");
    place_ = place_ == Place::kStart ? Place::kName : Place::kSpecial;
    kind_.clear();
    return true;
  }
  bool key(string_t& name) override {
    if (place_ == Place::kSpecial && kind_.empty()) {
      kind_ = name;
    } else if (place_ == Place::kName) {
      name_ = name;
      if (values_.contains(name)) return unexpected("a second value");
      if (static_cast<int64_t>(values_.size()) == max_values_) {
        throw BadJson(fmt::format("more than {} values", max_values_));
      }
      place_ = Place::kValue;
    } else {
      return unexpected("the name " + quote(name));
    }
    return true;
  }
  bool end_object() override {
    if (place_ == Place::kSpecial) return unexpected("an empty object");
    place_ = Place::kName;
    return true;
  }

 private:
  enum class Place { kStart, kName, kValue, kSpecial, kSpecialEnd };

  bool add(FlatValue value) {
    if (place_ != Place::kValue) return unexpected("a value");
    values_.emplace(name_, std::move(value));
    place_ = Place::kName;
    return true;
  }

  bool unexpected(std::string_view what) override {
    throw BadJson(name_.empty() ? fmt::format("it begins with {}", what) : fmt::format("{} at {}", what, quote(name_)));
  }

  FlatValues& values_;
  int64_t max_values_;
  Place place_ = Place::kStart;
  std::string name_;
  std::string kind_;  // first name in the special value being read: "double", "hex" or "tensor"
};

}  // namespace

std::string to_flat_json(const FlatValues& values, int64_t max_values) try {
  if (static_cast<int64_t>(values.size()) > max_values) {
    throw CheckpointError(
        fmt::format("the state has {} values; a checkpoint can hold {}: put many numbers into a tensor", values.size(),
                    max_values));
  }
  std::string text = "{";
  for (const auto& [name, value] : values) {
    text += text.size() == 1 ? "\n  " : ",\n  ";
    text += dump(name) + ": " + std::visit([](const auto& v) { return to_json(v); }, value);
  }
  return text + "\n}\n";
} catch (const Json::type_error& error) {
  throw CheckpointError(fmt::format("a name in the state is not UTF-8: {}", error.what()));
}

FlatValues parse_flat_json(std::string_view text, std::string_view file, int64_t max_values) {
  FlatValues values;
  FlatReader reader(values, max_values);
  read_json(text, file, reader);
  return values;
}

}  // namespace fulgur
