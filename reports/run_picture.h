#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "fulgur/reports/metric_table.h"
#include "fulgur/reports/run_folder.h"

namespace fulgur {

// Whether a run is in progress, as far as can be told from this host.
struct RunLife {
  enum class State {
    unknown,      // the process is one of another host, or env.json does not name it
    in_progress,  // the process runs on this host
    ended,        // the process ran on this host and is gone, or the last files of a run of another host say so
  };
  State state = State::unknown;
  std::optional<double> silent_s{};  // seconds since it last wrote metrics, log.txt or env.json; nullopt: none is there
  std::filesystem::path post_mortem{};  // what the exception that ended its last fit left; empty: there is none
};

// Looks at the process that env.json names if it is one of this host. A process that began after the run did is another
// one with the same id. A run of another host has ended if an exception left a post_mortem/ after the last metrics, or
// if all steps are taken and report.html was written after them.
RunLife life_of(const RunFolder& run, std::chrono::system_clock::time_point now);

// How far a run is, by what it has logged.
struct RunProgress {
  int64_t num_steps = 0;                      // optimizer steps taken, those before the run resumed included
  std::optional<int64_t> num_steps_in_all{};  // as estimated when fit started; nullopt: unknown
  std::optional<double> steps_per_s{};        // mean since fit started; nullopt: unknown
  std::optional<double> left_s{};             // estimated seconds to the last step; nullopt: unknown
  std::optional<double> idle_s{};             // seconds since the last row was written; nullopt: there is none
  RunLife life{};                             // progress_of() leaves it unknown
};
RunProgress progress_of(const RunFolder& run, std::chrono::system_clock::time_point now);

// A line of at most `width` blocks, each as high as the mean of its part of the values; x where none is finite.
std::string sparkline(std::span<const MetricPoint> points, size_t width);

struct PictureOptions {
  size_t width = 80;  // columns; no line is longer
  size_t height = 0;  // most lines; 0: as many as it takes
};

// A run for a terminal: progress, speed, whether it has ended, and for each metric its last value and a sparkline.
// Below 50 columns a metric takes two lines. A run whose life is unknown, and which has written nothing for ten
// minutes, shows no sign of life.
std::string run_picture(const RunFolder& run, const RunProgress& progress, PictureOptions options = {});

}  // namespace fulgur
