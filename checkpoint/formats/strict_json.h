#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fulgur/checkpoint/limits.h"

namespace fulgur {

// A text is not what the reader expects; the message is the reason, without the file name.
struct BadJson : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The events of a JSON text, for a reader that knows what may come next. Every event that a reader does not override
// throws BadJson, so that nothing is built from a refused text, however long or deeply nested it is.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_unsigned(number_unsigned_t) override { return unexpected("a number"); }
  bool number_float(number_float_t, const string_t&) override { return unexpected("a fraction"); }
  bool string(string_t&) override { return unexpected("a text"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool start_object(size_t) override { return unexpected("an object"); }
  bool key(string_t&) override { return unexpected("a name"); }
  bool end_object() override { return unexpected("the end of an object"); }
  bool start_array(size_t) override { return unexpected("an array"); }
  bool end_array() override { return unexpected("the end of an array"); }
  bool parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception& error) final;

 protected:
  // Throws BadJson; an override adds the position in the text.
  virtual bool unexpected(std::string_view what) { throw BadJson("unexpected " + std::string(what)); }
};

// `text` must be one JSON value. Throws CheckpointError: "<file>: <reason>".
void read_json(std::string_view text, std::string_view file, JsonEvents& events);

// Parses the text into a tree. Throws CheckpointError if the limits are exceeded or an object has a name twice (the
// later value would silently replace the first).
struct JsonLimits {
  int max_depth = 4;
  int64_t max_values = limits::kJsonValues;  // a tree takes up to 100 bytes per value
};
nlohmann::json parse_json(std::string_view text, std::string_view file, JsonLimits limits = {});

// For messages: quotes a name from a file, cut if it is too long to read.
std::string quote(std::string_view name);

}  // namespace fulgur
