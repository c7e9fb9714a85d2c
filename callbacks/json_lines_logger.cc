#include "fulgur/callbacks/json_lines_logger.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

std::string quoted(const std::string& text) {
  using Json = nlohmann::json;
  return Json(text).dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string number(double value) {
  if (std::isnan(value)) return "null";
  if (std::isinf(value)) return value > 0 ? "1e999" : "-1e999";
  return fmt::format("{}", value);
}

std::string text_of(const State::Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* whole = std::get_if<int64_t>(&value)) return fmt::format("{}", *whole);
  if (const auto* real = std::get_if<double>(&value)) return number(*real);
  if (const auto* text = std::get_if<std::string>(&value)) return quoted(*text);
  return "null";  // a tensor
}

// A member for every value: {"a": 1, "b": 2}.
template <class Values, class ToText>
std::string object_of(const Values& values, const ToText& to_text) {
  std::vector<std::string> members;
  for (const auto& [name, value] : values) members.push_back(fmt::format("{}: {}", quoted(name), to_text(value)));
  return fmt::format("{{{}}}", fmt::join(members, ", "));
}

std::string json_of(const Histogram& histogram) {
  std::vector<std::string> limits;
  for (const double limit : histogram.limits) limits.push_back(number(limit));
  return fmt::format(
      R"({{"count": {}, "min": {}, "max": {}, "sum": {}, "sum_of_squares": {}, "limits": [{}], "counts": [{}]}})",
      histogram.count, number(histogram.min), number(histogram.max), number(histogram.sum),
      number(histogram.sum_of_squares), fmt::join(limits, ", "), fmt::join(histogram.counts, ", "));
}

// The members of the line that hold the record; empty for one that is not shown.
struct Content {
  const std::string& name;
  std::string operator()(const Histogram& histogram) const {
    return fmt::format(R"("name": {}, "histogram": {})", quoted(name), json_of(histogram));
  }
  std::string operator()(const Text& text) const {
    return fmt::format(R"("name": {}, "text": {})", quoted(name), quoted(text.text));
  }
  std::string operator()(const HyperParameters& parameters) const {
    return fmt::format(R"("hyper_parameters": {})", object_of(parameters.values.values(), text_of));
  }
  std::string operator()(const Image&) const { return {}; }
};

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void JsonLinesLoggerOptions::describe(FieldVisitor& visit) {
  visit({.name = "filename", .help = "file to write, in the run's folder"}, &filename);
}

JsonLinesLogger::JsonLinesLogger(Options options) : options_(std::move(options)) {
  const fs::path name(options_.filename);
  if (!name.empty() && name == name.filename() && name != "." && name != "..") return;
  throw UsageError(
      fmt::format("JsonLinesLogger: filename = '{}' is to be the name of a file in the run's folder, without '/'",
                  options_.filename));
}

std::shared_ptr<JsonLinesLogger> JsonLinesLogger::make(Options options) {
  return std::make_shared<JsonLinesLogger>(std::move(options));
}

void JsonLinesLogger::on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) {
  write(trainer, step, fmt::format(R"("metrics": {})", object_of(metrics, number)));
}

void JsonLinesLogger::on_record(TrainerControl& trainer, const Record& record, int64_t step) {
  if (!file_.is_open()) file_.open_in(trainer.run_dir(), options_.filename);
  const bool is_known = std::holds_alternative<HyperParameters>(record.content) && file_.has_begun();
  const std::string content = is_known ? "" : std::visit(Content{record.name}, record.content);
  if (!content.empty()) write(trainer, step, content);
}

void JsonLinesLogger::write(TrainerControl& trainer, int64_t step, const std::string& content) {
  if (!file_.is_open()) file_.open_in(trainer.run_dir(), options_.filename);
  file_.append(fmt::format("{{\"epoch\": {}, \"step\": {}, \"time\": {:.3f}, {}}}\n", trainer.state().epoch, step,
                           seconds_since_1970(), content));
}

void JsonLinesLogger::teardown(TrainerControl&, EntryPoint) { file_.close(); }

}  // namespace fulgur
