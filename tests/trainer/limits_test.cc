// How much of the data is run: limits of every stage, trial runs, overfitting, streams, loaders that are recreated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/csv_logger.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/core/callback.h"
#include "fulgur/data/data_module.h"
#include "fulgur/loops/batch_limit.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/counting_module.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/unsized_loader.h"

namespace fulgur {
namespace {

using testing::CountingModule;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::quiet;
using testing::tiny_loader;
using testing::UnsizedLoader;

std::shared_ptr<Loader> ten_batches() { return tiny_loader(40, 4); }
std::shared_ptr<Loader> stream_of_ten() { return UnsizedLoader::make(ten_batches()); }

// Returns the number of batches that each stage runs under the same limit.
template <class MakeLoader>
std::vector<int64_t> run_under(BatchLimit limit, const MakeLoader& loader) {
  Trainer trainer(quiet({.limit_train_batches = limit,
                         .limit_val_batches = limit,
                         .limit_test_batches = limit,
                         .limit_predict_batches = limit}));
  const auto module = make_module<CountingModule>();
  trainer.fit(module, {.train = loader(), .val = loader()});
  trainer.test(module, {.test = loader()});
  EXPECT_EQ(trainer.predict(module, {.predict = loader()}).size(), module->predicted);
  return {module->trained, module->validated, module->tested, module->predicted};
}

TEST(Limits, BatchesAreACount) {
  EXPECT_THAT(run_under(Batches(3), ten_batches), Each(3));
  EXPECT_THAT(run_under(Batches(1), ten_batches), Each(1));
  EXPECT_THAT(run_under(Batches(99), ten_batches), Each(10));
}

TEST(Limits, AFractionIsOfTheEpochRoundedDown) {
  EXPECT_THAT(run_under(Fraction(0.5), ten_batches), Each(5));
  EXPECT_THAT(run_under(Fraction(0.39), ten_batches), Each(3));
  EXPECT_THAT(run_under(Fraction(1.0), ten_batches), Each(10));
}

TEST(Limits, ZeroTurnsTheStageOff) {
  EXPECT_THAT(run_under(Batches(0), ten_batches), Each(0));
  EXPECT_THAT(run_under(Fraction(0.0), ten_batches), Each(0));
}

TEST(Limits, NoValidationDataIsRunUnderAZeroLimitOfVal) {
  const auto module = make_module<CountingModule>();
  Trainer(quiet({.limit_val_batches = Batches(0)})).fit(module, {.train = ten_batches(), .val = ten_batches()});
  EXPECT_THAT((std::vector{module->trained, module->validated, module->sanity_checked}), ElementsAre(10, 0, 0));
}

TEST(Limits, AStreamTakesBatchesOrAllOfIt) {
  EXPECT_THAT(run_under(Batches(3), stream_of_ten), Each(3));
  EXPECT_THAT(run_under(Batches(99), stream_of_ten), Each(10));
  EXPECT_THAT(run_under(Fraction(1.0), stream_of_ten), Each(10));
  EXPECT_THAT(run_under(Fraction(0.0), stream_of_ten), Each(0));
}

TEST(Limits, AStreamHasNoFraction) {
  const BatchLimit half = Fraction(0.5);
  const auto stream = stream_of_ten();
  const auto module = make_module<CountingModule>();
  EXPECT_THROW(Trainer(quiet({.limit_train_batches = half})).fit(module, {.train = stream}), SetupError);
  EXPECT_THROW(Trainer(quiet({.limit_val_batches = half})).fit(module, {.train = ten_batches(), .val = stream}),
               SetupError);
  EXPECT_THROW(Trainer(quiet({.limit_val_batches = half})).validate(module, {.val = stream}), SetupError);
  EXPECT_THROW(Trainer(quiet({.limit_test_batches = half})).test(module, {.test = stream}), SetupError);
  EXPECT_THROW(Trainer(quiet({.limit_predict_batches = half})).predict(module, {.predict = stream}), SetupError);
  EXPECT_EQ(module->trained, 0);
}

TEST(Limits, EachOfSeveralLoadersHasItsOwn) {
  const auto module = make_module<CountingModule>();
  Trainer trainer(quiet({.limit_val_batches = Fraction(0.5)}));
  trainer.validate(module, {.val = {tiny_loader(40, 4), tiny_loader(16, 4)}});
  EXPECT_EQ(module->validated, 5 + 2);
}

TEST(BatchLimit, TheSmallestFractionThatAMessageNamesGivesABatch) {
  for (int64_t num_batches = 2; num_batches <= 2000; ++num_batches) {
    std::string message;
    try {
      BatchLimit(Fraction(0.5 / static_cast<double>(num_batches))).of(num_batches, "limit");
    } catch (const SetupError& error) {
      message = error.what();
    }
    const size_t start = message.find("at least Fraction(");
    ASSERT_NE(start, std::string::npos);
    const double fraction = std::stod(message.substr(start + sizeof("at least Fraction(") - 1));
    ASSERT_EQ(BatchLimit(Fraction(fraction)).of(num_batches, "limit"), 1) << message;
  }
}

TEST(TimeSpans, AreReadAsTheyAreWritten) {
  using std::chrono::milliseconds;
  EXPECT_EQ(TimeSpan(milliseconds(500)).to_string(), "00:00:00:00.5");
  EXPECT_EQ(TimeSpan(milliseconds(93'784'250)).to_string(), "01:02:03:04.25");
  EXPECT_EQ(TimeSpan(std::chrono::hours(30)).to_string(), "01:06:00:00");
  for (const int64_t ms : {0, 1, 500, 1500, 86'400'001}) {
    EXPECT_EQ(TimeSpan(TimeSpan(milliseconds(ms)).to_string()).seconds(),
              std::chrono::duration<double>(milliseconds(ms)));
  }
  EXPECT_THROW(TimeSpan("00:00:00.5:00"), UsageError);
  EXPECT_THROW(TimeSpan("00:00:00:1e3"), UsageError);
}

TEST(EstimatedSteps, AreCeiledBatchesByEpochsCappedByMaxSteps) {
  const auto estimate = [](TrainerOptions options, std::shared_ptr<Loader> train) {
    struct Asking : testing::TinyModule {
      std::optional<int64_t> steps;
      Optimizers configure_optimizers() override {
        steps = run_state().estimated_stepping_batches;  // read where schedules are made
        return TinyModule::configure_optimizers();
      }
      at::Tensor training_step(const Batch&, int64_t) override { throw std::runtime_error("enough"); }
    };
    const auto module = make_module<Asking>();
    EXPECT_THROW(Trainer(quiet(std::move(options))).fit(module, {.train = std::move(train)}), std::runtime_error);
    return module->steps;
  };
  EXPECT_EQ(estimate({.max_epochs = 3, .accumulate_grad_batches = 4}, ten_batches()), 3 * 3);
  EXPECT_EQ(estimate({.max_epochs = 3, .limit_train_batches = Batches(5)}, ten_batches()), 3 * 5);
  EXPECT_EQ(estimate({.max_epochs = 3, .max_steps = 7}, ten_batches()), 7);
  EXPECT_EQ(estimate({.max_steps = 7}, ten_batches()), 7);
  EXPECT_EQ(estimate({.max_epochs = 3}, stream_of_ten()), std::nullopt);
  EXPECT_EQ(estimate({.max_epochs = 3, .max_steps = 7}, stream_of_ten()), 7);
  EXPECT_EQ(estimate({.max_epochs = 3, .limit_train_batches = Batches(5)}, stream_of_ten()), 3 * 5);
  EXPECT_EQ(estimate({.max_epochs = -1}, ten_batches()), std::nullopt);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(estimate({.max_epochs = kMost}, ten_batches()), kMost);
  EXPECT_EQ(estimate({.max_epochs = kMost, .max_steps = 7}, ten_batches()), 7);

  // In fast_dev_run they are those of the whole training.
  EXPECT_EQ(estimate({.max_epochs = 3, .fast_dev_run = 1}, ten_batches()), 3 * 10);
  EXPECT_EQ(estimate({.fast_dev_run = 1}, ten_batches()), 1 * 10);  // quiet() sets one epoch
  EXPECT_EQ(estimate({.max_epochs = 3, .fast_dev_run = 2, .limit_train_batches = Batches(5)}, ten_batches()), 3 * 5);
  EXPECT_EQ(estimate({.max_epochs = 3, .fast_dev_run = 1, .overfit_batches = Batches(2)}, ten_batches()), 3 * 2);
  EXPECT_EQ(estimate({.max_epochs = 3, .fast_dev_run = 1, .accumulate_grad_batches = 4}, ten_batches()), 3 * 3);
  EXPECT_EQ(estimate({.max_epochs = 3, .max_steps = 7, .fast_dev_run = 1}, ten_batches()), 7);
  EXPECT_EQ(estimate({.max_epochs = 3, .fast_dev_run = 1}, stream_of_ten()), std::nullopt);
}

TEST(BatchLimit, AnEstimateIsNeverAnError) {
  EXPECT_EQ(BatchLimit(Fraction(0.1)).estimate_of(50), 5);
  EXPECT_EQ(BatchLimit(Fraction(0.1)).estimate_of(5), 1);
  EXPECT_EQ(BatchLimit(Fraction(0.1)).estimate_of(std::nullopt), std::nullopt);
  EXPECT_EQ(BatchLimit().estimate_of(5), 5);
  EXPECT_EQ(BatchLimit(Fraction(0.0)).estimate_of(5), 0);
  EXPECT_EQ(BatchLimit(Batches(3)).estimate_of(std::nullopt), 3);
}

TEST(EstimatedSteps, AScheduleThatNeedsThemGetsThemOrSaysWhatToSet) {
  struct Needing : testing::TinyModule {
    int64_t steps = 0;
    Optimizers configure_optimizers() override {
      steps = estimated_stepping_batches();
      return TinyModule::configure_optimizers();
    }
  };
  const auto module = make_module<Needing>();
  Trainer(quiet({.max_steps = 7})).fit(module, {.train = ten_batches()});
  EXPECT_EQ(module->steps, 7);
  const auto fit = [](TrainerOptions options, std::shared_ptr<Loader> train) {
    return testing::message_of<UsageError>(
        [&] { Trainer(quiet(std::move(options))).fit(make_module<Needing>(), {.train = std::move(train)}); });
  };
  EXPECT_THAT(fit({.max_epochs = -1}, ten_batches()), HasSubstr("Needing needs to know how many steps training takes"));
  EXPECT_THAT(fit({.max_epochs = 3}, stream_of_ten()), HasSubstr("set max_steps, or max_epochs and a loader that"));
}

TEST(FastDevRun, RunsOneEpochOfSoManyBatchesOfEveryStage) {
  Trainer trainer(quiet({.max_epochs = 9,
                         .min_epochs = 5,
                         .fast_dev_run = 2,
                         .overfit_batches = Batches(7),
                         .limit_val_batches = Fraction(1.0),
                         .check_val_every_n_epoch = 3}));
  const auto module = make_module<CountingModule>();
  trainer.fit(module, {.train = ten_batches(), .val = ten_batches()});
  trainer.test(module, {.test = ten_batches()});
  trainer.predict(module, {.predict = ten_batches()});
  EXPECT_THAT((std::vector{module->trained, module->validated, module->tested, module->predicted}), Each(2));
  EXPECT_EQ(module->sanity_checked, 0);
  EXPECT_EQ(trainer.state().epoch, 1);
}

TEST(FastDevRun, BeginsAnewAndSaysSo) {
  ::testing::internal::CaptureStderr();
  const Trainer trainer(quiet({.fast_dev_run = 1, .ckpt_path = "runs/mine/checkpoints/last"}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("ckpt_path = 'runs/mine/checkpoints/last' is left out in fast_dev_run"));
  EXPECT_EQ(trainer.options().ckpt_path, "");
}

TEST(FastDevRun, WritesNothingWhoeverAsksForIt) {
  struct WithCallbacks : CountingModule {
    std::vector<std::shared_ptr<Callback>> configure_callbacks() override {
      return {ModelCheckpoint::make(), CSVLogger::make()};
    }
  };
  const testing::TempDir dir;
  Trainer trainer({.accelerator = "cpu",
                   .fast_dev_run = 1,
                   .log_every_n_steps = 1,
                   .default_root_dir = dir.path().string(),
                   .enable_progress_bar = false,
                   .enable_model_summary = false,
                   .enable_checkpointing = true,
                   .logger = true,
                   .callbacks = {ModelCheckpoint::make()}});
  trainer.fit(make_module<WithCallbacks>(), {.train = ten_batches(), .val = ten_batches()});
  EXPECT_EQ(trainer.state().global_step, 1);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

// Records which batches the steps of a run saw, each as the sum of its features.
struct SeeingModule : CountingModule {
  std::vector<float> seen;
  at::Tensor training_step(const Batch& batch, int64_t i) override {
    seen.push_back(batch["x"].sum().item<float>());
    return CountingModule::training_step(batch, i);
  }
};

TEST(OverfitBatches, TrainsOnTheSameBatchesInEveryEpoch) {
  const auto module = make_module<SeeingModule>();
  Trainer trainer(quiet({.max_epochs = 2, .overfit_batches = Batches(2)}));
  trainer.fit(module, {.train = tiny_loader(40, 4, /*shuffle=*/true), .val = ten_batches()});
  ASSERT_EQ(module->seen.size(), 4U);
  EXPECT_EQ(module->seen[0], module->seen[2]);
  EXPECT_EQ(module->seen[1], module->seen[3]);
  EXPECT_NE(module->seen[0], module->seen[1]);
  EXPECT_EQ(module->validated, 2 * 2);
}

TEST(OverfitBatches, BeatsTheLimitsOfTrainAndValAndLeavesTestAlone) {
  const auto module = make_module<CountingModule>();
  Trainer trainer(quiet({.overfit_batches = Fraction(0.3),
                         .limit_train_batches = Batches(9),
                         .limit_val_batches = Batches(9),
                         .limit_test_batches = Batches(9)}));
  trainer.fit(module, {.train = ten_batches(), .val = ten_batches()});
  trainer.test(module, {.test = ten_batches()});
  EXPECT_THAT((std::vector{module->trained, module->validated, module->tested}), ElementsAre(3, 3, 9));
}

// Each new loader has one batch more than the one before.
struct GrowingData : DataModule {
  int64_t train_calls = 0, val_calls = 0;
  std::shared_ptr<Loader> train_dataloader() override { return tiny_loader(4 * ++train_calls, 4); }
  LoaderList val_dataloader() override { return tiny_loader(4 * ++val_calls, 4); }
};

TEST(ReloadDataloaders, AsksForThemEveryNEpochs) {
  struct Lengths : Callback {
    std::vector<int64_t> lengths;
    void on_train_epoch_start(TrainerControl& trainer) override {
      lengths.push_back(trainer.state().num_batches.value());
    }
  };
  const auto callback = std::make_shared<Lengths>();
  const auto module = make_module<CountingModule>();
  GrowingData data;
  Trainer(quiet({.max_epochs = 5, .reload_dataloaders_every_n_epochs = 2, .callbacks = {callback}})).fit(module, data);
  EXPECT_THAT(callback->lengths, ElementsAre(1, 1, 2, 2, 3));
  EXPECT_EQ(module->trained, 1 + 1 + 2 + 2 + 3);
  EXPECT_EQ(module->validated, 1 + 1 + 2 + 2 + 3);
}

TEST(ReloadDataloaders, WarnsOnceThatThereIsNothingToValidateWith) {
  ::testing::internal::CaptureStderr();
  Trainer(quiet({.max_epochs = 3, .reload_dataloaders_every_n_epochs = 1}))
      .fit(make_module<CountingModule>(), {.train = ten_batches()});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("no val loader"), std::string::npos);
  EXPECT_EQ(told.find("no val loader"), told.rfind("no val loader"));
}

TEST(ReloadDataloaders, NeverUnlessSaid) {
  GrowingData data;
  Trainer(quiet({.max_epochs = 3})).fit(make_module<CountingModule>(), data);
  EXPECT_EQ(data.train_calls, 1);
  EXPECT_EQ(data.val_calls, 1);
}

TEST(ReloadDataloaders, StepsOfValidationAreCountedOn) {
  struct LogsSteps : CountingModule {
    void validation_step(const Batch&, int64_t) override { log("v", 1.0, {.on_step = true, .on_epoch = false}); }
  };
  struct Steps : Callback {
    std::vector<int64_t> steps;
    void on_metrics(TrainerControl&, const Metrics& metrics, int64_t step) override {
      if (metrics.contains("v")) steps.push_back(step);
    }
  };
  const auto callback = std::make_shared<Steps>();
  GrowingData data;
  Trainer(
      quiet({.max_epochs = 2, .reload_dataloaders_every_n_epochs = 1, .log_every_n_steps = 1, .callbacks = {callback}}))
      .fit(make_module<LogsSteps>(), data);
  EXPECT_THAT(callback->steps, ElementsAre(0, 1, 2));
}

}  // namespace
}  // namespace fulgur
