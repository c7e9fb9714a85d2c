#include "fulgur/callbacks/kineto_profiler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TrainerOptions options_in(const fs::path& folder) {
  TrainerOptions options;
  options.default_root_dir = folder;
  options.name = "run";
  return options;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, int64_t> calls_in(const fs::path& trace) {
  std::map<std::string, int64_t> calls;
  const auto content = nlohmann::json::parse(text_of(trace));
  for (const auto& event : content.at("traceEvents")) {
    if (event.value("ph", "") == "X") ++calls[event.at("name")];
  }
  return calls;
}

KinetoProfilerOptions third_and_fourth_batch() { return {.wait_batches = 1, .warmup_batches = 1, .active_batches = 2}; }

// TinyModule has two layers.
TEST(KinetoProfiler, RecordsTheActiveBatches) {
  const testing::TempDir dir;
  TrainerOptions options = options_in(dir.path());
  options.callbacks = {KinetoProfiler::make(third_and_fourth_batch())};
  ::testing::internal::CaptureStdout();
  Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(40, 4)});
  const std::string shown = ::testing::internal::GetCapturedStdout();
  const fs::path folder = dir.path() / "runs/run";
  auto calls = calls_in(folder / "trace-rank0.json");
  EXPECT_EQ(calls["aten::addmm"], 4);
  EXPECT_EQ(calls["training_step"], 2);
  EXPECT_EQ(calls["backward"], 2);
  EXPECT_EQ(calls["TinyModule.on_train_batch_start"], 2);
  EXPECT_GT(calls["TanhBackward0"], 0);
  EXPECT_FALSE(calls.contains(""));
  EXPECT_THAT(shown, HasSubstr("of 2 batches\n"));
  EXPECT_THAT(shown, ContainsRegex(" 4 .* aten::addmm\n"));
  EXPECT_THAT(shown, HasSubstr(text_of(folder / "trace-rank0.txt")));
}

TEST(KinetoProfiler, OverwritesNothingOfAnEarlierFit) {
  const testing::TempDir dir;
  const fs::path folder = dir.path() / "runs/run";
  const auto fit = [&] {
    TrainerOptions options = options_in(dir.path());
    options.callbacks = {KinetoProfiler::make(third_and_fourth_batch())};
    Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(40, 4)});
  };
  fit();
  const std::string trace = text_of(folder / "trace-rank0.json"), table = text_of(folder / "trace-rank0.txt");
  fit();
  EXPECT_EQ(text_of(folder / "trace-rank0.json"), trace);
  EXPECT_EQ(text_of(folder / "trace-rank0.txt"), table);
  EXPECT_EQ(calls_in(folder / "trace-rank0-v1.json")["training_step"], 2);
  EXPECT_THAT(text_of(folder / "trace-rank0-v1.txt"), HasSubstr("of 2 batches\n"));
}

// Ends the first two epochs at their second batch: at the first batch that is recorded, and at the last of them.
struct EndsEpochs : Callback {
  BatchAction on_train_batch_start(TrainerControl& trainer, const Batch&, int64_t batch_idx) override {
    return trainer.state().epoch < 2 && batch_idx == 1 ? BatchAction::skip_epoch : BatchAction::run;
  }
};

TEST(KinetoProfiler, ASkippedEpochDoesNotEndTheRecording) {
  const testing::TempDir dir;
  TrainerOptions options = options_in(dir.path());
  options.max_epochs = 3;
  options.callbacks = {KinetoProfiler::make({.wait_batches = 1, .warmup_batches = 0, .active_batches = 2}),
                       std::make_shared<EndsEpochs>()};
  Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(40, 4)});
  EXPECT_EQ(calls_in(dir.path() / "runs/run/trace-rank0.json")["training_step"], 2);
}

TEST(KinetoProfiler, ListsAsManyOperatorsAsAskedFor) {
  const testing::TempDir dir;
  TrainerOptions options = options_in(dir.path());
  options.callbacks = {
      KinetoProfiler::make({.wait_batches = 0, .warmup_batches = 0, .active_batches = 1, .table_rows = 3})};
  Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(8, 4)});
  const std::string table = text_of(dir.path() / "runs/run/trace-rank0.txt");
  EXPECT_EQ(std::ranges::count(table, '\n'), 1 + 3) << table;
}

// Ranks that are threads of one process, as only tests have them.
TEST(KinetoProfiler, RecordsOneFitOfAProcessAtATime) {
  const testing::TempDir dir;
  testing::run_ranks(2, [&](World&) {
    TrainerOptions options = options_in(dir.path());
    options.devices = 2;
    options.callbacks = {KinetoProfiler::make(third_and_fourth_batch())};
    Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(80, 4)});
  });
  const fs::path folder = dir.path() / "runs/run";
  EXPECT_NE(fs::exists(folder / "trace-rank0.json"), fs::exists(folder / "trace-rank1.json"));
}

TEST(KinetoProfiler, ComesByTheTrainersSettingAndSaysIfItRecordedNothing) {
  const testing::TempDir dir;
  TrainerOptions options = options_in(dir.path());
  options.profiler = "kineto";
  options.max_steps = 6;
  ::testing::internal::CaptureStderr();
  Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(80, 4)});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("recorded nothing: fit ended after 6 batches, and recording begins after 7"));
  EXPECT_FALSE(fs::exists(dir.path() / "runs/run/trace-rank0.json"));
  options.max_steps = 8;
  Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(80, 4)});
  EXPECT_EQ(calls_in(dir.path() / "runs/run/trace-rank0.json")["training_step"], 1);
}

TEST(KinetoProfiler, IsLeftOutOfAFastDevRun) {
  const testing::TempDir dir;
  TrainerOptions options = options_in(dir.path());
  options.profiler = "kineto";
  options.fast_dev_run = 20;
  Trainer(testing::quiet(options)).fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(80, 4)});
  EXPECT_FALSE(fs::exists(dir.path() / "runs/run/trace-rank0.json"));
}

// The next fit of the process records again.
TEST(KinetoProfiler, StopsWhenFitThrows) {
  struct Throws : testing::TinyModule {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (batch_idx == 2) throw std::runtime_error("as it should");
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  const testing::TempDir dir;
  TrainerOptions options = options_in(dir.path());
  options.callbacks = {KinetoProfiler::make({.wait_batches = 0, .warmup_batches = 1, .active_batches = 3})};
  Trainer trainer(testing::quiet(options));
  EXPECT_ANY_THROW(trainer.fit(make_module<Throws>(), {.train = testing::tiny_loader()}));
  EXPECT_FALSE(fs::exists(dir.path() / "runs/run/trace-rank0.json"));
  trainer.fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader()});
  EXPECT_EQ(calls_in(dir.path() / "runs/run/trace-rank0.json")["training_step"], 3);
  EXPECT_THAT(testing::message_of<UsageError>([] { KinetoProfiler::make({.active_batches = 0}); }),
              HasSubstr("active_batches"));
}

}  // namespace
}  // namespace fulgur
