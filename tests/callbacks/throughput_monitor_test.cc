#include "fulgur/callbacks/throughput_monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Lt;
using testing::message_of;
using ::testing::SizeIs;
using namespace std::chrono_literals;

constexpr auto kStep = 5ms, kWait = 15ms, kValidation = 40ms;
constexpr int64_t kBatches = 6, kBatchSize = 4;

// Takes its time for every batch.
class SlowLoader final : public Loader {
 public:
  std::optional<int64_t> num_batches() const override { return kBatches; }
  std::optional<int64_t> batch_size() const override { return kBatchSize; }
  void begin_epoch(int64_t epoch) override { batches_->begin_epoch(epoch); }
  std::optional<Batch> next() override {
    std::this_thread::sleep_for(kWait);
    return batches_->next();
  }

 private:
  std::shared_ptr<DataLoader> batches_ = testing::tiny_loader(kBatches * kBatchSize, kBatchSize);
};

struct Slow : testing::TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    std::this_thread::sleep_for(kStep);
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch&, int64_t) override { std::this_thread::sleep_for(kValidation); }
};

class Recorder final : public Callback {
 public:
  std::map<std::string, std::vector<double>> values;
  void on_metrics(TrainerControl&, const Metrics& metrics, int64_t) override {
    for (const auto& [name, value] : metrics) values[name].push_back(value);
  }
};

TEST(ThroughputMonitor, MeasuresTrainingWithItsWaitForDataButWithoutValidation) {
  const auto recorder = std::make_shared<Recorder>();
  const auto monitor = ThroughputMonitor::make({.num_items = [](const Batch& batch) { return 7 * batch.batch_size(); },
                                                .flops_per_sample = 10.0,
                                                .peak_flops = 1e4});
  TrainerOptions options{.val_check_interval = Batches(1), .callbacks = {monitor, recorder}};
  options.log_every_n_steps = 1;
  const auto begin = std::chrono::steady_clock::now();
  Trainer(testing::quiet(options))
      .fit(make_module<Slow>(), {.train = std::make_shared<SlowLoader>(), .val = testing::tiny_loader(4, 4)});
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - begin;
  const double least_s = std::chrono::duration<double>(kStep + kWait).count();
  auto& values = recorder->values;
  EXPECT_THAT(values["train/batches_per_sec"], AllOf(SizeIs(kBatches - 1), Each(Lt(1 / least_s))));
  // Validations take more than half of the time: with them in it, the rate would be below this bound.
  const std::chrono::duration<double> without_validations = all - kBatches * kValidation;
  EXPECT_GE(values["train/batches_per_sec"].back(), (kBatches - 1) / without_validations.count());
  for (size_t i = 0; i + 1 < kBatches; ++i) {
    const double rate = values["train/batches_per_sec"][i];
    EXPECT_DOUBLE_EQ(values["train/samples_per_sec"][i], kBatchSize * rate);
    EXPECT_DOUBLE_EQ(values["train/items_per_sec"][i], 7 * kBatchSize * rate);
    EXPECT_DOUBLE_EQ(values["train/flops_per_sec"][i], 10 * kBatchSize * rate);
    EXPECT_DOUBLE_EQ(values["train/mfu"][i], 10 * kBatchSize * rate / 1e4);
    EXPECT_GE(values["train/data_wait"][i], std::chrono::duration<double>(kWait).count() * rate);
    EXPECT_LT(values["train/data_wait"][i], 1.0);
  }
  EXPECT_DOUBLE_EQ(monitor->samples_per_sec(), values["train/samples_per_sec"].back());
  EXPECT_DOUBLE_EQ(monitor->items_per_sec(), values["train/items_per_sec"].back());
}

TEST(ThroughputMonitor, TakesItsRatesOverAWindow) {
  const auto recorder = std::make_shared<Recorder>();
  // The last two batches have a thousand times the samples of the others.
  int64_t batch = 0;
  const auto samples = [&](const Batch&) { return ++batch > kBatches - 2 ? 1000 : 1; };
  TrainerOptions options{.callbacks = {ThroughputMonitor::make({.num_samples = samples, .window_size = 2}), recorder}};
  options.log_every_n_steps = 1;
  Trainer(testing::quiet(options)).fit(make_module<Slow>(), {.train = testing::tiny_loader(24, 4)});
  auto& values = recorder->values;
  for (const auto& [step, per_batch] : {std::pair{2, 1.0}, {3, 500.5}, {4, 1000.0}}) {
    const auto i = static_cast<size_t>(step);
    EXPECT_DOUBLE_EQ(values["train/samples_per_sec"][i], per_batch * values["train/batches_per_sec"][i]) << step;
  }
  EXPECT_FALSE(values.contains("train/items_per_sec"));
  EXPECT_FALSE(values.contains("train/mfu"));
}

TEST(ThroughputMonitor, RefusesNumbersOutOfRange) {
  EXPECT_THAT(message_of<UsageError>([] { ThroughputMonitor::make({.window_size = 0}); }),
              HasSubstr("window_size must be at least 1"));
  EXPECT_THAT(message_of<UsageError>([] { ThroughputMonitor::make({.peak_flops = -1}); }), HasSubstr("peak_flops"));
}

}  // namespace
}  // namespace fulgur
