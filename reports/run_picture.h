#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "fulgur/reports/metric_table.h"
#include "fulgur/reports/run_folder.h"

namespace fulgur {

// How far a run is, by what it has logged.
struct RunProgress {
  int64_t num_steps = 0;                      // optimizer steps taken, those before the run resumed included
  std::optional<int64_t> num_steps_in_all{};  // as estimated when fit started; nullopt: unknown
  std::optional<double> steps_per_s{};        // mean since fit started; nullopt: unknown
  std::optional<double> left_s{};             // estimated seconds to the last step; nullopt: unknown
  std::optional<double> idle_s{};             // seconds since the last row was written; nullopt: there is none
};
RunProgress progress_of(const RunFolder& run, std::chrono::system_clock::time_point now);

// A line of at most `width` blocks, each as high as the mean of its part of the values; x where none is finite.
std::string sparkline(std::span<const MetricPoint> points, size_t width);

struct PictureOptions {
  size_t width = 80;  // columns; no line is longer
  size_t height = 0;  // most lines; 0: as many as it takes
};

// A run for a terminal: progress, speed, and for each metric its last value and a sparkline. Below 50 columns a metric
// takes two lines.
std::string run_picture(const RunFolder& run, const RunProgress& progress, PictureOptions options = {});

}  // namespace fulgur
