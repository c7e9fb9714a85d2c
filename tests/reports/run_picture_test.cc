#include "fulgur/reports/run_picture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace fulgur {
namespace {

using ::testing::HasSubstr;

std::vector<MetricPoint> points_of(const std::vector<double>& values) {
  std::vector<MetricPoint> points;
  for (const double value : values) points.push_back({.step = static_cast<int64_t>(points.size()), .value = value});
  return points;
}

// A run that resumed at step 100 and has taken 50 more in 25 seconds, of 200.
RunFolder resumed_run() {
  RunFolder run{.name = "runs/a"};
  run.environment = {{"started", "2026-01-02T03:04:05Z"}, {"first_step", "100"}, {"estimated_stepping_batches", "200"}};
  run.metrics = parse_metric_table("epoch,step,device/host_rss_mib,train_loss\n2,100,375,0.5\n3,149,376,0.25\n", "a");
  run.metrics_time = std::chrono::sys_days(std::chrono::year(2026) / 1 / 2) + std::chrono::hours(3) +
                     std::chrono::minutes(4) + std::chrono::seconds(30);
  return run;
}

TEST(RunPicture, ProgressCountsFromTheStepAtWhichTheRunResumed) {
  const RunFolder run = resumed_run();
  const RunProgress progress = progress_of(run, run.metrics_time + std::chrono::seconds(3));
  EXPECT_EQ(progress.num_steps, 150);
  EXPECT_EQ(progress.num_steps_in_all, 200);
  EXPECT_EQ(progress.steps_per_s, 2.0);
  EXPECT_EQ(progress.left_s, 25.0);
  EXPECT_EQ(progress.idle_s, 3.0);
}

TEST(RunPicture, ShowsProgressAndMetrics) {
  const RunFolder run = resumed_run();
  EXPECT_EQ(run_picture(run, progress_of(run, run.metrics_time + std::chrono::seconds(3)), {.width = 79}),
            "runs/a\n"
            "[#######################################..............] 75%\n"
            "step 150 of 200  epoch 3  2 steps/s  0:25 left  logged 0:03 ago\n"
            "train_loss           0.25         █▁\n"
            "device/host_rss_mib  376          ▁█\n");
}

TEST(RunPicture, ARunThatHasEndedHasNoTimeLeft) {
  const RunFolder run = resumed_run();
  RunProgress progress = progress_of(run, run.metrics_time + std::chrono::hours(1));
  progress.life = {.state = RunLife::State::ended, .silent_s = 3600.0, .post_mortem = "runs/a/post_mortem"};
  EXPECT_THAT(run_picture(run, progress, {.width = 79}),
              HasSubstr("\nstep 150 of 200  epoch 3  2 steps/s  ended  logged 1:00:00 ago\n"
                        "an exception ended it; see runs/a/post_mortem\n"));
}

TEST(RunPicture, ARunThatMayHaveEndedElsewhereShowsNoSignOfLife) {
  const RunFolder run = resumed_run();
  RunProgress progress = progress_of(run, run.metrics_time + std::chrono::hours(1));
  const auto picture = [&](const RunLife& life) {
    progress.life = life;
    return run_picture(run, progress, {.width = 100});
  };
  EXPECT_THAT(picture({.silent_s = 3500.0}), HasSubstr("  no sign of life for 58:20  logged 1:00:00 ago\n"));
  EXPECT_THAT(picture({.silent_s = 500.0}), HasSubstr("  0:25 left  logged 1:00:00 ago\n"));  // log.txt has grown
  EXPECT_THAT(picture({.state = RunLife::State::in_progress, .silent_s = 3500.0}), HasSubstr("  0:25 left  logged"));
}

TEST(RunPicture, TheLifeOfARunThatNamesNoProcessIsUnknown) {
  const RunFolder run = resumed_run();
  const RunLife life = life_of(run, run.metrics_time);
  EXPECT_EQ(life.state, RunLife::State::unknown);
  EXPECT_EQ(life.silent_s, std::nullopt);
}

// The columns of a line in which only the texts of the next test are wide.
size_t columns_on_terminal(std::string line) {
  size_t num_columns = 0;
  for (const std::string wide : {"损", "失", "🚀"}) {
    for (size_t found = line.find(wide); found != std::string::npos; found = line.find(wide)) {
      line.erase(found, wide.size());
      num_columns += 2;
    }
  }
  const auto begins = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; };
  return num_columns + static_cast<size_t>(std::ranges::count_if(line, begins));
}

TEST(RunPicture, NoLineIsWiderThanTheTerminal) {
  RunFolder run = resumed_run();
  run.name = "runs/a_name_that_is_much_longer_than_the_terminal";
  run.notes = {"the last row of metrics.csv is incomplete, and is left out"};
  run.metrics.curves[1].name = "损失🚀损失损失损失损失损失";
  run.last_output = "error: \x1b[2J\tno more";
  for (size_t width = 1; width <= 120; ++width) {
    std::istringstream lines(run_picture(run, progress_of(run, run.metrics_time), {.width = width}));
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(columns_on_terminal(line), width) << line;
      EXPECT_EQ(line.find('\x1b'), std::string::npos);
    }
  }
}

TEST(RunPicture, ExtremeNumbersInFilesDoNotOverflow) {
  RunFolder run = resumed_run();
  run.metrics = parse_metric_table("epoch,step,loss\n0,9223372036854775807,1\n", "a");
  run.environment = {{"started", "9999-01-02T03:04:05Z"},
                     {"first_step", "-9223372036854775808"},
                     {"estimated_stepping_batches", "-9223372036854775808"}};
  const RunProgress future = progress_of(run, run.metrics_time);
  EXPECT_EQ(future.num_steps, std::numeric_limits<int64_t>::max());
  EXPECT_FALSE(future.steps_per_s);
  run.environment[0].second = "2026-01-02T03:04:05Z";
  const RunProgress progress = progress_of(run, run.metrics_time);
  EXPECT_EQ(progress.left_s, 0.0);
  EXPECT_THAT(run_picture(run, progress), HasSubstr("step 9223372036854775807 of -9223372036854775808"));
}

TEST(RunPicture, ANarrowTerminalHasTwoLinesForEachMetric) {
  const RunFolder run = resumed_run();
  EXPECT_EQ(run_picture(run, progress_of(run, run.metrics_time + std::chrono::seconds(3)), {.width = 20}),
            "runs/a\n"
            "[#########....] 75%\n"
            "step 150 of 200\n"
            "epoch 3  2 steps/s\n"
            "0:25 left\n"
            "logged 0:03 ago\n"
            "train_loss\n"
            "0.25         █▁\n"
            "device/host_rss_mib\n"
            "376          ▁█\n");
}

TEST(RunPicture, WhatIsUnknownIsLeftOut) {
  RunFolder run{.name = "runs/a"};
  run.notes = {"there is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere"};
  EXPECT_EQ(run_picture(run, progress_of(run, {})),
            "runs/a\nthere is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere\n");
  RunFolder older = resumed_run();
  older.environment = {{"started", "yesterday"}, {"first_step", "many"}};
  const RunProgress progress = progress_of(older, older.metrics_time);
  EXPECT_EQ(progress.num_steps, 150);
  EXPECT_FALSE(progress.num_steps_in_all || progress.steps_per_s || progress.left_s);
  EXPECT_THAT(run_picture(older, progress), HasSubstr("step 150  epoch 3  logged 0:00 ago\n"));
}

TEST(RunPicture, ALowTerminalShowsTheFirstLines) {
  const RunFolder run = resumed_run();
  const std::string picture = run_picture(run, progress_of(run, run.metrics_time), {.width = 79, .height = 2});
  EXPECT_EQ(std::ranges::count(picture, '\n'), 2);
}

TEST(RunPicture, SparklinesGoFromTheLowestToTheHighestMean) {
  EXPECT_EQ(sparkline(points_of({0, 1, 2, 3, 4, 5, 6, 7}), 20), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(sparkline(points_of({0, 2, 8, 8}), 2), "▁█");
  EXPECT_EQ(sparkline(points_of({3, 3}), 20), "▁▁");
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kMax = std::numeric_limits<double>::max();
  EXPECT_EQ(sparkline(points_of({0, kNan, 1}), 20), "▁x█");
  EXPECT_EQ(sparkline(points_of({kNan}), 20), "x");
  EXPECT_EQ(sparkline(points_of({-kMax, kMax}), 20), "▁█");
  EXPECT_EQ(sparkline({}, 20), "");
  EXPECT_EQ(sparkline(points_of({1, 2}), 0), "");
}

}  // namespace
}  // namespace fulgur
