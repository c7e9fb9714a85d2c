#include "fulgur/reports/line_chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/reports/markup.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Pixels = std::vector<std::pair<double, double>>;

// The text between `begin` and the next quote; empty if there is none.
std::string quoted_after(const std::string& svg, const std::string& begin) {
  const size_t found = svg.find(begin);
  if (found == std::string::npos) return "";
  const size_t from = found + begin.size();
  return svg.substr(from, svg.find('"', from) - from);
}

std::string attribute(const std::string& svg, const std::string& name) { return quoted_after(svg, " " + name + "=\""); }

// The pixels of the run's line, by part.
std::vector<Pixels> parts_of(const std::string& svg, int run) {
  std::istringstream all(quoted_after(svg, "<path class=\"run" + std::to_string(run) + "\" d=\""));
  std::vector<Pixels> parts;
  std::string part;
  std::getline(all, part, 'M');
  while (std::getline(all, part, 'M')) {
    std::istringstream numbers(part.substr(part.find('L') + 1));
    Pixels& pixels = parts.emplace_back();
    for (double x = 0, y = 0; numbers >> x >> y;) pixels.emplace_back(x, y);
  }
  return parts;
}

std::vector<MetricPoint> points_of(const std::vector<double>& values) {
  std::vector<MetricPoint> points;
  for (const double value : values) points.push_back({.step = static_cast<int64_t>(points.size()), .value = value});
  return points;
}

std::string chart_of(const std::vector<MetricPoint>& points) {
  const ChartLine line{.points = points, .run = 0};
  return line_chart("loss", {&line, 1});
}

TEST(LineChart, LowestAndHighestAreAtTheEdgesOfTheArea) {
  const std::string svg = chart_of(points_of({2, 8, 5}));
  EXPECT_EQ(attribute(svg, "data-steps"), "0 2");
  EXPECT_EQ(attribute(svg, "data-values"), "2 8");
  int left = 0, top = 0, right = 0, bottom = 0;
  std::istringstream(attribute(svg, "data-area")) >> left >> top >> right >> bottom;
  const double middle_x = (left + right) / 2, middle_y = (top + bottom) / 2;
  EXPECT_EQ(parts_of(svg, 0), (std::vector<Pixels>{{{left, bottom}, {middle_x, top}, {right, middle_y}}}));
}

// A spike of one value among a million is what a person looks for.
TEST(LineChart, EachColumnKeepsItsLowestAndHighestValue) {
  std::vector<double> values(1'000'000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(double(i) * 1e-5);
  values[400'123] = 50;
  values[700'456] = -50;
  const std::string svg = chart_of(points_of(values));
  EXPECT_LT(svg.size(), 20'000u);
  double highest = 1e9, lowest = -1e9;  // pixels count downwards
  std::map<double, int> points_of_column;
  const std::vector<Pixels> parts = parts_of(svg, 0);
  ASSERT_EQ(parts.size(), 1u);  // there is no gap
  for (const auto& [x, y] : parts[0]) {
    highest = std::min(highest, y);
    lowest = std::max(lowest, y);
    EXPECT_LE(++points_of_column[x], 4);
  }
  EXPECT_EQ(highest, 12);
  EXPECT_EQ(lowest, 220);
  EXPECT_EQ(points_of_column.size(), 409u);
}

TEST(LineChart, FirstAndLastValueAreKept) {
  std::vector<double> values(100'000, 0.0);
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i % 7);
  values.front() = 3;
  values.back() = 2;
  const Pixels pixels = parts_of(chart_of(points_of(values)), 0).at(0);
  EXPECT_NEAR(pixels.front().second, 220 - 208 * 3.0 / 6, 0.06);
  EXPECT_NEAR(pixels.back().second, 220 - 208 * 2.0 / 6, 0.06);
}

TEST(LineChart, ValuesThatAreNotFiniteInterruptTheLineAndAreMarked) {
  const std::string svg = chart_of(points_of({1, 2, kNan, std::numeric_limits<double>::infinity(), 1}));
  ASSERT_EQ(parts_of(svg, 0).size(), 2u);
  EXPECT_EQ(parts_of(svg, 0)[1].size(), 1u);
  EXPECT_EQ(attribute(svg, "data-values"), "1 2");
  EXPECT_THAT(svg, HasSubstr("<path class=\"run0 mark\" d=\"M266 12v7M368 12v7\"/>"));
}

TEST(LineChart, ALineThatBeginsWithNonFiniteValuesIsWhole) {
  const std::vector<Pixels> parts = parts_of(chart_of(points_of({kNan, kNan, 1, 2, 3})), 0);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].size(), 3u);
}

TEST(LineChart, WithoutAFiniteValueItSaysSo) {
  const std::string svg = chart_of(points_of({kNan, kNan}));
  EXPECT_THAT(svg, HasSubstr("no finite value"));
  EXPECT_THAT(svg, HasSubstr("mark"));
  EXPECT_THAT(svg, Not(HasSubstr("data-values")));
}

// The extremes must neither overflow nor loop.
TEST(LineChart, AnyFiniteValueHasAPlace) {
  constexpr double kMax = std::numeric_limits<double>::max(), kTiny = std::numeric_limits<double>::denorm_min();
  for (const auto& values : std::vector<std::vector<double>>{{0},
                                                             {5, 5},
                                                             {-kMax, kMax},
                                                             {kMax, kMax},
                                                             {0, kTiny},
                                                             {1e300, std::nextafter(1e300, 2e300)},
                                                             {-7},
                                                             {1e9, 1e9 + 1e-6}}) {
    const std::string svg = chart_of(points_of(values));
    EXPECT_LT(svg.size(), 5000u);
    const std::vector<Pixels> parts = parts_of(svg, 0);
    ASSERT_EQ(parts.size(), 1u);
    for (const auto& [x, y] : parts[0]) {
      EXPECT_TRUE(x >= 62 && x <= 470 && y >= 12 && y <= 220) << values[0] << ": " << x << " " << y;
    }
  }
}

// The texts beside the axis of values, from the lowest to the highest.
std::vector<std::string> value_labels(const std::string& svg) {
  std::vector<std::string> labels;
  for (size_t found = svg.find("text-anchor=\"end\""); found != std::string::npos;
       found = svg.find("text-anchor=\"end\"", found + 1)) {
    const size_t from = svg.find('>', found) + 1;
    labels.push_back(svg.substr(from, svg.find('<', from) - from));
  }
  return labels;
}

TEST(LineChart, AMetricThatIsAlwaysZeroHasAnAxisAroundIt) {
  const std::string svg = chart_of(points_of({0, 0, 0}));
  EXPECT_EQ(attribute(svg, "data-values"), "-1 1");
  EXPECT_THAT(value_labels(svg), ElementsAre("-1", "-0.5", "0", "0.5", "1"));
}

TEST(LineChart, LabelsOfValuesAreDistinct) {
  EXPECT_THAT(value_labels(chart_of(points_of({10'000'000, 10'000'003}))),
              ElementsAre("10000000", "10000001", "10000002", "10000003"));
  for (const double offset : {0.0, 1.0, -1.0, 1e6, -1e9, 1e12}) {
    for (const double range : {1e-12, 3e-7, 0.7, 2.0, 5e4, 3e9}) {
      const auto labels = value_labels(chart_of(points_of({offset, offset + range})));
      EXPECT_EQ(std::set(labels.begin(), labels.end()).size(), labels.size()) << offset << " + " << range;
    }
  }
}

TEST(LineChart, LinesOfSeveralRunsShareTheAxes) {
  const auto a = points_of({0, 1}), b = points_of({1, 2, 3, 4});
  const std::vector<ChartLine> lines{{.points = a, .run = 0}, {.points = b, .run = 1}};
  const std::string svg = line_chart("loss", lines);
  EXPECT_EQ(attribute(svg, "data-steps"), "0 3");
  EXPECT_EQ(attribute(svg, "data-values"), "0 4");
  EXPECT_EQ(parts_of(svg, 0).at(0).back(), (std::pair{198.0, 168.0}));
  EXPECT_EQ(parts_of(svg, 1).at(0).back(), (std::pair{470.0, 12.0}));
  EXPECT_EQ(colour_of_run(13), "class=\"run3\" stroke-dasharray=\"4 2\"");
}

TEST(LineChart, TheTitleIsEscaped) {
  EXPECT_EQ(escape_html("</script> & \"it's\" \xff"), "&lt;/script&gt; &amp; &quot;it&#39;s&quot; \xEF\xBF\xBD");
  const std::string svg = line_chart("</script>\"", {});
  EXPECT_THAT(svg, HasSubstr("aria-label=\"&lt;/script&gt;&quot;\""));
}

}  // namespace
}  // namespace fulgur
