#include "fulgur/checkpoint/formats/strict_json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

// Lets everything within the limits pass.
class Limiter : public JsonEvents {
 public:
  explicit Limiter(JsonLimits limits) : limits_(limits) {}

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool start_object(size_t) override { return descend(); }
  bool end_object() override { return ascend(); }
  bool start_array(size_t) override { return descend(); }
  bool end_array() override { return ascend(); }
  bool key(string_t& name) override {
    if (!names_.back().insert(name).second) throw BadJson(fmt::format("the name {} is there twice", quote(name)));
    return true;
  }

 private:
  bool count() {
    if (++num_values_ > limits_.max_values) throw BadJson(fmt::format("more than {} values", limits_.max_values));
    return true;
  }
  bool descend() {
    names_.emplace_back();
    if (static_cast<int>(names_.size()) > limits_.max_depth) {
      throw BadJson(fmt::format("nested more than {} deep", limits_.max_depth));
    }
    return count();
  }
  bool ascend() {
    names_.pop_back();
    return true;
  }

  JsonLimits limits_;
  int64_t num_values_ = 0;
  std::vector<std::set<std::string>> names_;  // names seen so far in each open object, outermost first
};

}  // namespace

bool JsonEvents::parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception&) {
  throw BadJson(fmt::format("byte {} is not JSON, near {}", position, quote(last_token)));
}

void read_json(std::string_view text, std::string_view file, JsonEvents& events) {
  try {
    if (text.find('\0') != text.npos) throw BadJson("a zero byte");  // nlohmann would take it for the end of the text
    nlohmann::json::sax_parse(text, &events);
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

nlohmann::json parse_json(std::string_view text, std::string_view file, JsonLimits limits) {
  Limiter limiter(limits);
  read_json(text, file, limiter);
  return nlohmann::json::parse(text);
}

std::string quote(std::string_view name) {
  constexpr size_t kMaxBytes = 100;
  std::string text = "'";
  for (const char c : name.substr(0, kMaxBytes)) text += static_cast<unsigned char>(c) < ' ' ? '?' : c;
  return text + (name.size() > kMaxBytes ? "...'" : "'");
}

}  // namespace fulgur
