#include "fulgur/callbacks/device_stats_monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

constexpr size_t kMiB = 1 << 20;

// Computes for 50 ms in each step, and from the third step on holds 64 MiB more.
struct Busy : testing::TinyModule {
  std::vector<char> held;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (batch_idx == 2) held.assign(64 * kMiB, 1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    while (std::chrono::steady_clock::now() < end) {
    }
    return TinyModule::training_step(batch, batch_idx);
  }
};

struct Recorder final : Callback {
  std::vector<Metrics> steps;
  void on_metrics(TrainerControl&, const Metrics& metrics, int64_t) override { steps.push_back(metrics); }
};

std::vector<Metrics> steps_with(const DeviceStatsMonitorOptions& options) {
  const auto recorder = std::make_shared<Recorder>();
  TrainerOptions given{.callbacks = {DeviceStatsMonitor::make(options), recorder}};
  given.log_every_n_steps = 1;
  Trainer(testing::quiet(given)).fit(make_module<Busy>(), {.train = testing::tiny_loader(32, 8)});
  return recorder->steps;
}

double mib_of_machine() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  double kib = 0.0;
  file >> name >> kib;  // MemTotal is the first line
  return kib / 1024;
}

TEST(DeviceStatsMonitor, LogsMemoryAndComputingTime) {
  const auto steps = steps_with({.refresh_s = 0.0});
  ASSERT_EQ(steps.size(), 4U);
  for (const Metrics& step : steps) {
    EXPECT_GT(step.at("device/host_cpu_percent"), 1.0);  // other work may take the cores
    EXPECT_LT(step.at("device/host_available_mib"), mib_of_machine());
    EXPECT_GT(step.at("device/host_available_mib"), 0.0);
    EXPECT_FALSE(step.contains("device/allocated_mib"));
  }
  const double grown = steps[2].at("device/host_rss_mib") - steps[1].at("device/host_rss_mib");
  EXPECT_GT(grown, 60.0);
  EXPECT_LT(grown, 100.0);
}

TEST(DeviceStatsMonitor, LogsTheSameValuesUntilItIsTimeToLookAgain) {
  const auto steps = steps_with({.refresh_s = 3600.0});
  ASSERT_EQ(steps.size(), 4U);
  EXPECT_EQ(steps[3].at("device/host_rss_mib"), steps[0].at("device/host_rss_mib"));
  EXPECT_THAT(testing::message_of<UsageError>([] { DeviceStatsMonitor::make({.refresh_s = -1.0}); }),
              ::testing::HasSubstr("refresh_s"));
}

}  // namespace
}  // namespace fulgur
