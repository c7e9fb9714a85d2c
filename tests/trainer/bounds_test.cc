// When fit ends: bounds, minimum bounds, and requested stops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>

#include "core/callback.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/counting_module.h"
#include "trainer/trainer.h"

namespace fulgur {
namespace {

using namespace std::chrono_literals;
using testing::CountingModule;
using ::testing::HasSubstr;
using testing::quiet;
using testing::stop_at_batch;
using testing::tiny_loader;

struct Ended {
  int64_t epochs, steps, batches;
  bool operator==(const Ended&) const = default;
  friend void PrintTo(const Ended& ended, std::ostream* out) {
    *out << ended.epochs << " epochs, " << ended.steps << " steps, " << ended.batches << " batches";
  }
};

Ended fit(TrainerOptions options) {
  Trainer trainer(quiet(std::move(options)));
  const auto module = make_module<CountingModule>();
  trainer.fit(module, {.train = tiny_loader(40, 8)});  // 5 batches
  return {trainer.state().epoch, trainer.state().global_step, module->trained};
}

TEST(FitBounds, MaxStepsCountsStepsOfTheOptimizer) {
  EXPECT_EQ(fit({.max_steps = 2, .accumulate_grad_batches = 2}), (Ended{1, 2, 4}));
}

TEST(FitBounds, NoStepsIsNoTraining) { EXPECT_EQ(fit({.max_steps = 0}), (Ended{0, 0, 0})); }

TEST(FitBounds, MinEpochsWinsOverAStop) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_epochs = 2, .callbacks = {stop_at_batch(1)}}), (Ended{2, 10, 10}));
}

TEST(FitBounds, MinStepsWinsOverAStop) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_steps = 7, .callbacks = {stop_at_batch(1)}}), (Ended{2, 7, 7}));
}

TEST(FitBounds, TheLaterOfTwoMinimaCounts) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_epochs = 1, .min_steps = 7, .callbacks = {stop_at_batch(1)}}), (Ended{2, 7, 7}));
  EXPECT_EQ(fit({.max_epochs = 9, .min_epochs = 2, .min_steps = 3, .callbacks = {stop_at_batch(1)}}),
            (Ended{2, 10, 10}));
}

TEST(FitBounds, AMaximumWinsOverAMinimum) {
  EXPECT_EQ(fit({.max_steps = 3, .min_steps = 7}), (Ended{1, 3, 3}));
  EXPECT_EQ(fit({.max_epochs = 1, .min_epochs = 2}), (Ended{1, 5, 5}));
}

TEST(FitBounds, AStopAfterTheMinimaIsHeardAtOnce) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_steps = 2, .callbacks = {stop_at_batch(4)}}), (Ended{1, 4, 4}));
}

TEST(FitBounds, AStopWaitsForTheEndOfTheWindow) {
  EXPECT_EQ(fit({.max_epochs = 9, .accumulate_grad_batches = 3, .callbacks = {stop_at_batch(1)}}), (Ended{1, 1, 3}));
}

TEST(FitBounds, AStopBeforeTrainingTrainsNothing) {
  struct StopAtStart : Callback {
    void on_fit_start(TrainerControl& trainer) override { trainer.request_stop("no need"); }
    void on_train_end(TrainerControl&) override { ended = true; }
    bool ended = false;
  };
  const auto callback = std::make_shared<StopAtStart>();
  EXPECT_EQ(fit({.callbacks = {callback}}), (Ended{0, 0, 0}));
  EXPECT_TRUE(callback->ended);
}

TEST(FitBounds, AStopIsForgottenByTheNextFit) {
  Trainer trainer(quiet({.callbacks = {stop_at_batch(3)}}));
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  trainer.request_stop("between two runs");
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  EXPECT_EQ(trainer.state().global_step, 1);  // stop_at_batch asks again at once
}

TEST(FitBounds, MaxTimeEndsFit) { EXPECT_EQ(fit({.max_epochs = 9, .max_time = 0s}), (Ended{0, 0, 0})); }

TEST(FitBounds, MinimaWinOverMaxTimeWhichBoundsNoEpochs) {
  EXPECT_EQ(fit({.min_steps = 12, .max_time = 0s}), (Ended{3, 12, 12}));
  EXPECT_EQ(fit({.min_epochs = 3, .max_time = 0s}), (Ended{3, 15, 15}));
}

TEST(FitBounds, MaxTimeMayBeAnyTime) {
  EXPECT_EQ(fit({.max_epochs = 1, .max_time = "99:00:00:00"}), (Ended{1, 5, 5}));
  EXPECT_EQ(fit({.max_epochs = 1, .max_time = std::chrono::hours::max()}), (Ended{1, 5, 5}));
}

TEST(FitBounds, WithoutAnyThereAreAThousandEpochsAndAWarning) {
  TrainerOptions options = quiet({.callbacks = {stop_at_batch(1)}});
  options.max_epochs = std::nullopt;
  Trainer trainer(options);
  ::testing::internal::CaptureStderr();
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("neither max_epochs, max_steps nor max_time is set"));
  EXPECT_EQ(trainer.state().max_epochs, 1000);
}

}  // namespace
}  // namespace fulgur
