#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "fulgur/reports/metric_table.h"

namespace fulgur {

// One curve of a chart.
struct ChartLine {
  std::span<const MetricPoint> points;  // borrowed
  size_t run = 0;                       // chooses the colour and the dashes
};

// A chart of value over step as one SVG element, whose size does not grow with the number of points: in each column of
// pixels a line keeps its first lowest and its first highest point, and of all points the first and the last. A value
// that is not finite is marked at the upper edge; it interrupts the line if its column of pixels has no finite value.
// Colours are the classes run0 to run9 and the variables --text and --grid of the page that has the chart.
//   The attributes data-steps and data-values of the element are the ends of its axes, which correspond to the area
// data-area: left, top, right, bottom.
std::string line_chart(std::string_view title, std::span<const ChartLine> lines);

constexpr size_t kNumColours = 10;  // run 10 has the colour of run 0, with other dashes

// The attributes of what shows a run's colour: class="run3".
std::string colour_of_run(size_t run);

}  // namespace fulgur
