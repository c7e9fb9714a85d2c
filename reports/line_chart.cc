#include "fulgur/reports/line_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/reports/markup.h"

namespace fulgur {
namespace {

// Units of the SVG, which the page scales: about the pixels of a phone.
constexpr int kWidth = 480, kHeight = 250;
constexpr int kLeft = 62, kTop = 12, kRight = 470, kBottom = 220;
constexpr int kMarkLength = 7;    // a mark shows a value that is not finite
constexpr size_t kMostDots = 50;  // a line of at most so many points has a dot at each

// Round numbers at equal distances.
struct Ticks {
  std::vector<double> values{};
  int num_digits = 0;  // significant digits that tell each value from the next
};

// Returns how many significant digits a number up to `largest` needs for a difference of `step` to show.
int digits_for(double largest, double step) {
  if (largest == 0) return 1;
  return static_cast<int>(std::floor(std::log10(largest)) - std::floor(std::log10(step))) + 1;
}

// One axis: values from `low` to `high` lie at pixels from `begin` to `end`.
class Axis {
 public:
  Axis(double low, double high, int begin, int end) : low_(low), high_(high), begin_(begin), end_(end) {
    if (low_ < high_) return;
    const double margin = low_ == 0 ? 1.0 : std::max(std::abs(low_) * 0.05, std::numeric_limits<double>::min());
    low_ -= margin;
    high_ += margin;
  }

  double low() const { return low_; }
  double high() const { return high_; }

  // Halves do not overflow, however far apart the ends are.
  double pixel(double value) const {
    return begin_ + (end_ - begin_) * ((value / 2 - low_ / 2) / (high_ / 2 - low_ / 2));
  }

  // Returns about `count` round numbers.
  Ticks ticks(int count) const {
    const double raw = (high_ / 2 - low_ / 2) / count * 2, power = std::pow(10, std::floor(std::log10(raw)));
    const double factor = raw / power;
    const double step = power * (factor < 1.5 ? 1 : factor < 3 ? 2 : factor < 7 ? 5 : 10);
    Ticks ticks;
    if (!(step > 0) || !std::isfinite(step)) return ticks;
    const double first = std::ceil(low_ / step);
    for (int i = 0; i <= 2 * count && (first + i) * step <= high_; ++i) {
      const double tick = (first + i) * step + 0.0;                            // the sum makes 0 of -0
      const bool is_new = ticks.values.empty() || tick > ticks.values.back();  // rounding may lead to the last again
      if (is_new) ticks.values.push_back(tick);
    }
    ticks.num_digits = digits_for(std::max(std::abs(low_), std::abs(high_)), step);
    return ticks;
  }

 private:
  double low_, high_;
  int begin_, end_;
};

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();

  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool is_empty() const { return low > high; }
};

// What a line keeps of one column of pixels.
struct PixelColumn {
  const MetricPoint *lowest = nullptr, *highest = nullptr;  // null: no finite value
  bool has_nonfinite = false;                               // there is a value that is not finite
};

std::vector<PixelColumn> columns_of(std::span<const MetricPoint> points, const Axis& steps) {
  std::vector<PixelColumn> columns(kRight - kLeft + 1);
  for (const MetricPoint& point : points) {
    PixelColumn& column = columns[static_cast<size_t>(std::lround(steps.pixel(double(point.step)))) - kLeft];
    if (!std::isfinite(point.value)) {
      column.has_nonfinite = true;
      continue;
    }
    if (column.lowest == nullptr || point.value < column.lowest->value) column.lowest = &point;
    if (column.highest == nullptr || point.value > column.highest->value) column.highest = &point;
  }
  return columns;
}

// Collects the path of a line, which may have several parts.
class Path {
 public:
  void interrupt() { begins_part_ = true; }
  void add(double x, double y) {
    if (std::exchange(begins_part_, false)) text_ += fmt::format("M{} {:.1f}L", x, y);  // a part of one point is a dot
    text_ += fmt::format("{}{} {:.1f}", text_.ends_with('L') ? "" : " ", x, y);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_{};
  bool begins_part_ = true;
};

const MetricPoint* first_finite(auto begin, auto end) {
  const auto found = std::find_if(begin, end, [](const MetricPoint& point) { return std::isfinite(point.value); });
  return found == end ? nullptr : &*found;
}

std::string path_of(std::span<const MetricPoint> points, const std::vector<PixelColumn>& columns, const Axis& steps,
                    const Axis& values) {
  Path path;
  const MetricPoint* added = nullptr;
  const auto add = [&](const MetricPoint* point) {
    if (point == added) return;
    path.add(std::round(steps.pixel(double(point->step))), values.pixel(point->value));
    added = point;
  };
  const MetricPoint *first = first_finite(points.begin(), points.end()),
                    *last = first_finite(points.rbegin(), points.rend());
  if (first == nullptr) return "";
  add(first);
  const auto begin = std::ranges::find_if(columns, [](const PixelColumn& column) { return column.lowest != nullptr; });
  for (const PixelColumn& column : std::ranges::subrange(begin, columns.end())) {
    if (column.lowest == nullptr) {
      if (column.has_nonfinite) path.interrupt();
      continue;
    }
    add(std::min(column.lowest, column.highest));  // in the order of the file
    add(std::max(column.lowest, column.highest));
  }
  add(last);
  return path.text();
}

std::string dots_of(std::span<const MetricPoint> points, const Axis& steps, const Axis& values) {
  std::string dots;
  for (const MetricPoint& point : points) {
    if (!std::isfinite(point.value)) continue;
    dots += fmt::format("M{:.1f} {:.1f}h0", steps.pixel(double(point.step)), values.pixel(point.value));
  }
  return dots;
}

std::string marks_of(const std::vector<PixelColumn>& columns) {
  std::string marks;
  for (size_t i = 0; i < columns.size(); ++i) {
    if (columns[i].has_nonfinite) marks += fmt::format("M{} {}v{}", kLeft + i, kTop, kMarkLength);
  }
  return marks;
}

std::string value_label(double y, double tick, int num_digits) {
  constexpr int kRoom = kLeft - 5;
  constexpr size_t kMostCharacters = 8;  // a longer label is compressed to the room that there is
  const std::string text = fmt::format("{:.{}g}", tick, std::clamp(num_digits, 6, 17));
  const std::string fit = text.size() <= kMostCharacters
                              ? ""
                              : fmt::format(" textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\"", kRoom - 1);
  return fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\"{}>{}</text>", kRoom, y + 4, fit, text);
}

std::string grid(const Axis& steps, const std::optional<Axis>& values) {
  std::string svg;
  if (values) {
    const Ticks ticks = values->ticks(4);
    for (const double tick : ticks.values) {
      const double y = values->pixel(tick);
      svg += fmt::format("<path class=\"grid\" d=\"M{} {:.1f}H{}\"/>", kLeft, y, kRight);
      svg += value_label(y, tick, ticks.num_digits);
    }
  }
  for (const double tick : steps.ticks(4).values) {
    if (tick != std::floor(tick) || tick < 0) continue;  // a step is a whole number from 0 on
    const double x = steps.pixel(tick);
    svg += fmt::format("<path class=\"grid\" d=\"M{:.1f} {}v4\"/>", x, kBottom);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.10g}</text>", x, kBottom + 17, tick);
  }
  return svg + fmt::format("<path class=\"grid\" d=\"M{} {}H{}\"/>", kLeft, kBottom, kRight);
}

struct Axes {
  Axis steps;
  std::optional<Axis> values;  // nullopt: there is no finite value
};

Axes axes_of(std::span<const ChartLine> lines) {
  Range steps, values;
  for (const ChartLine& line : lines) {
    for (const MetricPoint& point : line.points) {
      steps.add(double(point.step));
      if (std::isfinite(point.value)) values.add(point.value);
    }
  }
  if (steps.is_empty()) steps.add(0.0);
  Axes axes{.steps = Axis(steps.low, steps.high, kLeft, kRight), .values = std::nullopt};
  if (!values.is_empty()) axes.values.emplace(values.low, values.high, kBottom, kTop);
  return axes;
}

// The line, its dots if there are few points, and its marks.
std::string draw(const ChartLine& line, const Axis& steps, const std::optional<Axis>& values) {
  std::string svg;
  const std::vector<PixelColumn> columns = columns_of(line.points, steps);
  const std::string path = values ? path_of(line.points, columns, steps, *values) : "", marks = marks_of(columns);
  const size_t colour = line.run % kNumColours;
  if (!path.empty()) svg += fmt::format("<path {} d=\"{}\"/>", colour_of_run(line.run), path);
  if (!path.empty() && line.points.size() <= kMostDots) {
    svg += fmt::format("<path class=\"run{} dots\" d=\"{}\"/>", colour, dots_of(line.points, steps, *values));
  }
  if (!marks.empty()) svg += fmt::format("<path class=\"run{} mark\" d=\"{}\"/>", colour, marks);
  return svg;
}

}  // namespace

std::string colour_of_run(size_t run) {
  const size_t dashes = run / kNumColours;
  const std::string attribute = fmt::format("class=\"run{}\"", run % kNumColours);
  return dashes == 0 ? attribute : fmt::format("{} stroke-dasharray=\"{} 2\"", attribute, 2 + 2 * dashes);
}

std::string line_chart(std::string_view title, std::span<const ChartLine> lines) {
  const auto [steps, values] = axes_of(lines);
  std::string svg = fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" data-area=\"{} {} {} {}\" data-steps=\"{} {}\"",
      kWidth, kHeight, escape_html(title), kLeft, kTop, kRight, kBottom, steps.low(), steps.high());
  if (values) svg += fmt::format(" data-values=\"{} {}\"", values->low(), values->high());
  svg += fmt::format(">{}", grid(steps, values));
  if (!values) svg += fmt::format("<text x=\"{}\" y=\"{}\">no finite value</text>", kLeft + 8, (kTop + kBottom) / 2);
  for (const ChartLine& line : lines) svg += draw(line, steps, values);
  return svg + "</svg>";
}

}  // namespace fulgur
