#include "fulgur/reports/run_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ctime>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/reports/terminal_text.h"

namespace fulgur {
namespace {

using Clock = std::chrono::system_clock;
using Lines = std::vector<std::string>;

constexpr size_t kNarrow = 50;      // columns; below, a metric takes two lines
constexpr size_t kValueWidth = 12;  // -1.23457e-05
constexpr size_t kMostNameWidth = 30;
constexpr std::array<std::string_view, 8> kBlocks{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

// Joins parts with two spaces, in lines of at most `width` columns.
Lines flow(const Lines& parts, size_t width) {
  Lines lines;
  for (const std::string& part : parts) {
    if (!lines.empty() && columns_of(lines.back()) + 2 + columns_of(part) <= width) {
      lines.back() += "  " + part;
    } else {
      lines.push_back(terminal_text(part, width));
    }
  }
  return lines;
}

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::clamp(seconds, 0.0, 1e9));
  const int64_t hours = whole / 3600, minutes = whole / 60 % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60)
                   : fmt::format("{}:{:02}", minutes, whole % 60);
}

std::optional<int64_t> number_in(const RunFolder& run, std::string_view name) {
  const std::string* text = run.find_environment(name);
  int64_t number = 0;
  if (text == nullptr) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  return error == std::errc() && end == text->data() + text->size() ? std::optional(number) : std::nullopt;
}

// Seconds since 1970, which a Clock::time_point cannot hold for every year that env.json may name.
std::optional<double> start_of(const RunFolder& run) {
  const std::string* text = run.find_environment("started");
  std::tm time{};
  if (text == nullptr || strptime(text->c_str(), "%Y-%m-%dT%H:%M:%SZ", &time) == nullptr) return std::nullopt;
  return double(timegm(&time));
}

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

void add_progress(Lines& lines, const RunFolder& run, const RunProgress& progress, size_t width) {
  if (progress.num_steps_in_all && *progress.num_steps_in_all > 0) {
    const double done = std::clamp(double(progress.num_steps) / double(*progress.num_steps_in_all), 0.0, 1.0);
    const size_t length = std::min<size_t>(width, 60) - std::min<size_t>(width, 7);
    const auto filled = static_cast<size_t>(std::floor(done * double(length)));
    lines.push_back(terminal_text(fmt::format("[{}{}] {:.0f}%", std::string(filled, '#'),
                                              std::string(length - filled, '.'), std::floor(done * 100)),
                                  width));
  }
  Lines parts;
  const std::string in_all = progress.num_steps_in_all ? fmt::format(" of {}", *progress.num_steps_in_all) : "";
  if (progress.idle_s) parts.push_back(fmt::format("step {}{}", progress.num_steps, in_all));
  if (progress.idle_s) parts.push_back(fmt::format("epoch {}", run.metrics.last_epoch));
  if (progress.steps_per_s) parts.push_back(fmt::format("{:.3g} steps/s", *progress.steps_per_s));
  if (progress.left_s) parts.push_back(fmt::format("{} left", duration(*progress.left_s)));
  if (progress.idle_s) parts.push_back(fmt::format("logged {} ago", duration(*progress.idle_s)));
  for (std::string& line : flow(parts, width)) lines.push_back(std::move(line));
}

std::vector<const MetricCurve*> curves_by_kind(const MetricTable& metrics) {
  std::vector<const MetricCurve*> curves;
  for (const MetricCurve& curve : metrics.curves) {
    if (!curve.points.empty()) curves.push_back(&curve);
  }
  std::ranges::stable_sort(curves, {}, [](const MetricCurve* curve) { return kind_of_metric(curve->name); });
  return curves;
}

void add_metrics(Lines& lines, const MetricTable& metrics, size_t width) {
  const auto curves = curves_by_kind(metrics);
  size_t name_width = 0;
  for (const MetricCurve* curve : curves) name_width = std::max(name_width, columns_of(curve->name));
  name_width = std::min(name_width, kMostNameWidth);
  for (const MetricCurve* curve : curves) {
    std::string line;
    if (width < kNarrow) {
      lines.push_back(terminal_text(curve->name, width));
    } else {
      line = padded(curve->name, name_width) + "  ";
    }
    line += fmt::format("{:<{}.6g} ", curve->points.back().value, kValueWidth);
    const size_t used = columns_of(line);
    if (used < width) line += sparkline(curve->points, width - used);
    lines.push_back(terminal_text(line, width));
  }
}

}  // namespace

RunProgress progress_of(const RunFolder& run, Clock::time_point now) {
  RunProgress progress;
  progress.num_steps_in_all = number_in(run, "estimated_stepping_batches");
  if (run.metrics.num_rows == 0) return progress;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  progress.num_steps = run.metrics.last_step < kMost ? run.metrics.last_step + 1 : kMost;
  progress.idle_s = std::max(0.0, seconds(now - run.metrics_time));
  const auto first_step = number_in(run, "first_step");
  const auto start = start_of(run);
  const double passed_s = start ? seconds(run.metrics_time.time_since_epoch()) - *start : 0.0;
  if (!first_step || passed_s <= 0 || progress.num_steps <= *first_step) return progress;
  progress.steps_per_s = (double(progress.num_steps) - double(*first_step)) / passed_s;
  if (progress.num_steps_in_all) {
    const double num_left = double(*progress.num_steps_in_all) - double(progress.num_steps);
    progress.left_s = std::max(0.0, num_left) / *progress.steps_per_s;
  }
  return progress;
}

std::string sparkline(std::span<const MetricPoint> points, size_t width) {
  const size_t num_parts = std::min(width, points.size());
  std::vector<double> means;
  for (size_t part = 0; part < num_parts; ++part) {
    double sum = 0;
    size_t count = 0;
    for (size_t i = part * points.size() / num_parts; i < (part + 1) * points.size() / num_parts; ++i) {
      if (!std::isfinite(points[i].value)) continue;
      sum += points[i].value;
      ++count;
    }
    means.push_back(count == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / double(count));
  }
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double mean : means) {
    if (!std::isfinite(mean)) continue;
    low = std::min(low, mean);
    high = std::max(high, mean);
  }
  std::string line;
  for (const double mean : means) {
    const double height = high > low ? (mean / 2 - low / 2) / (high / 2 - low / 2) : 0.0;
    const auto block = static_cast<size_t>(std::lround(std::isfinite(height) ? height * (kBlocks.size() - 1) : 0));
    line += std::isfinite(mean) ? kBlocks[block] : "x";
  }
  return line;
}

std::string run_picture(const RunFolder& run, const RunProgress& progress, PictureOptions options) {
  const size_t width = std::max<size_t>(options.width, 1);
  Lines lines{terminal_text(run.name, width)};
  add_progress(lines, run, progress, width);
  for (const std::string& note : run.notes) lines.push_back(terminal_text(note, width));
  if (!run.last_output.empty()) lines.push_back(terminal_text("> " + run.last_output, width));
  add_metrics(lines, run.metrics, width);
  if (options.height > 0 && lines.size() > options.height) lines.resize(options.height);
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

}  // namespace fulgur
