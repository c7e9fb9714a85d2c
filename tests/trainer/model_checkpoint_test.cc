// How ModelCheckpoint follows a Trainer that steps, validates and ends: which steps it saves, under which name and
// score, and with which weights.
#include "fulgur/callbacks/model_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::tiny_loader;
using testing::TinyModule;

// Counts in a buffer the steps that its weights have seen, and gives each validation that count as its score, so that
// each score identifies its weights.
struct CountsSteps : TinyModule {
  at::Tensor steps;
  CountsSteps() { steps = register_buffer("steps", torch::zeros({})); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    steps.add_(1);
    log("steps_of_epoch", 1.0, {.on_step = false, .on_epoch = true, .reduce_fx = Reduction::sum});
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch&, int64_t) override { log("seen", steps); }
};

class ModelCheckpointInTraining : public ::testing::Test {
 protected:
  testing::TempDir dir;

  fs::path folder() const { return dir.path() / "runs/run/checkpoints"; }

  // Options of a run with five steps per epoch.
  TrainerOptions with(ModelCheckpointOptions options, TrainerOptions given = {}) {
    checkpoint = ModelCheckpoint::make(std::move(options));
    given.default_root_dir = dir.path();
    given.accelerator = "cpu";
    given.name = "run";
    if (!given.max_epochs) given.max_epochs = 1;
    given.enable_progress_bar = given.enable_model_summary = given.logger = false;
    given.callbacks.push_back(checkpoint);
    return given;
  }
  void fit(const TrainerOptions& options, std::shared_ptr<TinyModule> module = make_module<CountsSteps>()) {
    Trainer trainer(options);
    trainer.fit(std::move(module), {.train = tiny_loader(), .val = tiny_loader(8)});
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder())) found.push_back(entry.path().filename());
    std::ranges::sort(found);
    return found;
  }
  std::string target_of(const std::string& link) const { return fs::canonical(folder() / link).filename(); }
  double steps_in(const std::string& name) const {
    const CheckpointReader reader(folder() / name);
    for (const auto& [tensor_name, tensor] : reader.weights()) {
      if (tensor_name == "steps") return tensor.item<double>();
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  std::shared_ptr<ModelCheckpoint> checkpoint;
};

const ModelCheckpointOptions kBySteps{.filename = "{step}-{seen}", .monitor = "seen", .mode = "max"};

ModelCheckpointOptions by_steps(int64_t every_n_train_steps, int64_t save_top_k = 1) {
  ModelCheckpointOptions options = kBySteps;
  options.every_n_train_steps = every_n_train_steps;
  options.save_top_k = save_top_k;
  return options;
}

TEST_F(ModelCheckpointInTraining, WhatIsSavedBeforeTheFirstValidationHasNoScore) {
  for (const int64_t save_top_k : {1, -1}) {
    fs::remove_all(dir.path() / "runs");
    ::testing::internal::CaptureStderr();
    fit(with(by_steps(2, save_top_k)));
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("is NaN at step")));
    const std::vector<std::string> ranked{"best", "last", "step=5-seen=5"};
    const std::vector<std::string> all{"best", "last", "step=2-seen=nan", "step=4-seen=nan", "step=5-seen=5"};
    EXPECT_EQ(names(), save_top_k == 1 ? ranked : all);
  }
}

// Also where it does not tell which checkpoints are best.
TEST_F(ModelCheckpointInTraining, NamesHaveNoMetricOfOtherWeights) {
  for (const char* monitor : {"", "train_loss"}) {
    fs::remove_all(dir.path() / "runs");
    fit(with({.filename = "{step}-{seen}", .monitor = monitor, .save_top_k = -1, .every_n_train_steps = 1},
             {.max_epochs = 1, .val_check_interval = Batches(3)}));
    std::vector<std::string> found = names();
    std::erase_if(found, [](const std::string& name) { return !name.starts_with("step"); });
    EXPECT_THAT(
        found, ElementsAre("step=1-seen=nan", "step=2-seen=nan", "step=3-seen=3", "step=4-seen=nan", "step=5-seen=nan"))
        << monitor;
  }
}

TEST_F(ModelCheckpointInTraining, NamesOfARunThatResumesHaveNoMetricOfOtherWeights) {
  const ModelCheckpointOptions options{.filename = "{step}-{seen}", .save_top_k = -1, .every_n_train_steps = 1};
  const TrainerOptions trainer{.max_epochs = 1, .val_check_interval = Batches(3), .ckpt_path = "last"};
  TrainerOptions first = trainer;
  first.max_steps = 4;
  fit(with(options, first));
  fit(with(options, trainer));
  EXPECT_TRUE(fs::exists(folder() / "step=4-seen=4"));  // the last step of a fit is validated
  EXPECT_TRUE(fs::exists(folder() / "step=5-seen=nan"));
}

// The score of a metric with values of steps, too, among several loaders.
TEST_F(ModelCheckpointInTraining, AMonitorOfOneOfSeveralLoadersScoresItsStep) {
  struct LogsSteps : CountsSteps {
    void validation_step(const Batch&, int64_t) override { log("seen", steps, {.on_step = true, .on_epoch = true}); }
  };
  ModelCheckpointOptions options = by_steps(1, -1);
  options.monitor = "seen/dataloader_idx_1";
  options.filename = "{step}-{seen/dataloader_idx_1}";
  Trainer trainer(with(options, {.max_epochs = 1, .val_check_interval = Batches(3)}));
  trainer.fit(make_module<LogsSteps>(), {.train = tiny_loader(), .val = {tiny_loader(8), tiny_loader(8)}});
  EXPECT_EQ(target_of("best"), "step=3-seen_dataloader_idx_1=3");
  EXPECT_TRUE(fs::exists(folder() / "step=4-seen_dataloader_idx_1=nan"));
}

TEST_F(ModelCheckpointInTraining, ScoreNameAndWeightsAreThoseOfOneStep) {
  fit(with(by_steps(4, -1),
           {.max_epochs = 2, .val_check_interval = Batches(2), .check_val_every_n_epoch = std::nullopt}));
  EXPECT_THAT(names(), ElementsAre("best", "last", "step=10-seen=10", "step=4-seen=4", "step=8-seen=8"));
  EXPECT_EQ(steps_in("step=4-seen=4"), 4);
  EXPECT_EQ(steps_in("step=8-seen=8"), 8);
  EXPECT_EQ(target_of("best"), "step=10-seen=10");
  EXPECT_EQ(checkpoint->best_model_score(), 10);
}

TEST_F(ModelCheckpointInTraining, AScoreOfOlderWeightsMakesNoneTheBest) {
  fit(with(by_steps(1), {.val_check_interval = Batches(2), .check_val_every_n_epoch = std::nullopt}));
  EXPECT_THAT(names(), ElementsAre("best", "last", "step=4-seen=4", "step=5-seen=nan"));
  EXPECT_EQ(target_of("best"), "step=4-seen=4");
  EXPECT_EQ(target_of("last"), "step=5-seen=nan");
}

TEST_F(ModelCheckpointInTraining, AValidationThatIsDueWithinAWindowScoresTheStepThatEndsIt) {
  fit(with(by_steps(1, -1), {.val_check_interval = Batches(3), .accumulate_grad_batches = 2}));
  EXPECT_THAT(names(), ElementsAre("best", "last", "step=1-seen=nan", "step=2-seen=4", "step=3-seen=nan"));
}

TEST_F(ModelCheckpointInTraining, AMonitorThatTheFirstValidationDoesNotLogEndsTheRun) {
  ModelCheckpointOptions options = by_steps(1);
  options.monitor = "sen";
  options.filename = "{step}";
  EXPECT_THAT(message_of<SetupError>([&] { fit(with(options)); }), HasSubstr("did you mean 'seen'?"));
}

TEST_F(ModelCheckpointInTraining, SavesAtValidationsInTheMiddleOfAnEpoch) {
  const TrainerOptions trainer{.max_epochs = 2, .val_check_interval = Batches(2)};
  fit(with({.filename = "{step}-{seen}", .monitor = "seen", .save_top_k = -1, .every_n_epochs = 2}, trainer));
  EXPECT_THAT(names(), ElementsAre("best", "last", "step=10-seen=nan", "step=7-seen=7", "step=9-seen=9"));
  EXPECT_EQ(steps_in("step=7-seen=7"), 7);
  EXPECT_EQ(target_of("best"), "step=7-seen=7");
  EXPECT_EQ(target_of("last"), "step=10-seen=nan");
}

TEST_F(ModelCheckpointInTraining, AMonitorOfTheWholeEpochIsLookedAtWhereTheEpochEnds) {
  fit(with({.filename = "{step}-{steps_of_epoch}", .monitor = "steps_of_epoch", .save_top_k = -1},
           {.max_epochs = 2, .val_check_interval = Batches(2)}));
  EXPECT_THAT(names(), ElementsAre("best", "last", "step=10-steps_of_epoch=5", "step=5-steps_of_epoch=5"));
}

// The second one finds the first epoch the best, and its checkpoints are no states to resume from.
TEST_F(ModelCheckpointInTraining, OfTwoInOneFolderTheFirstSetsBestAndWholeStatesSetLast) {
  TrainerOptions options = with({.filename = "whole-{seen}", .monitor = "seen", .mode = "max"}, {.max_epochs = 2});
  options.callbacks.push_back(ModelCheckpoint::make(
      {.filename = "weights-{seen}", .monitor = "seen", .mode = "min", .save_weights_only = true}));
  fit(options);
  EXPECT_THAT(names(), ElementsAre("best", "last", "weights-seen=10", "weights-seen=5", "whole-seen=10"));
  EXPECT_EQ(target_of("best"), "whole-seen=10");
  EXPECT_EQ(target_of("last"), "whole-seen=10");
}

struct Diverges : TinyModule {
  void validation_step(const Batch&, int64_t) override { log("val_loss", std::numeric_limits<double>::quiet_NaN()); }
};

TEST_F(ModelCheckpointInTraining, NaNMakesNoneTheBestAndIsTold) {
  ::testing::internal::CaptureStderr();
  fit(with({.monitor = "val_loss"}, {.max_epochs = 2}), make_module<Diverges>());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("'val_loss' is NaN at step 5"), Not(HasSubstr("step 10"))));
  EXPECT_THAT(names(), ElementsAre("epoch=1-step=10", "last"));
}

TEST_F(ModelCheckpointInTraining, TheLastStepsAreSavedToo) {
  fit(with({.every_n_train_steps = 3}));
  EXPECT_THAT(names(), ElementsAre("epoch=0-step=5", "last"));
  fit(with({.every_n_train_steps = 3}, {.ckpt_path = "last"}));  // nothing is left to train or to save
  EXPECT_THAT(names(), ElementsAre("epoch=0-step=5", "last"));
  fit(with({.every_n_train_steps = 3}, {.max_epochs = 2, .ckpt_path = "last"}));
  EXPECT_EQ(steps_in("last"), 10);
}

TEST_F(ModelCheckpointInTraining, TheLastStepsAreSavedWhereNoValidationHasBeen) {
  fit(with({.filename = "{step}-{seen}", .monitor = "seen"}, {.max_epochs = 1, .check_val_every_n_epoch = 2}));
  EXPECT_THAT(names(), ElementsAre("last", "step=5-seen=nan"));
}

// A signal comes in the last step, before it is saved.
TEST_F(ModelCheckpointInTraining, ARunWithNothingLeftToTrainNamesItsEpoch) {
  class Ends final : public Callback {
   public:
    void on_train_batch_end(TrainerControl&, const at::Tensor&, const Batch&, int64_t batch_idx) override {
      if (batch_idx == 2) std::raise(SIGTERM);
    }
  };
  TrainerOptions trainer{.max_steps = 3, .ckpt_path = "last"};
  trainer.callbacks = {std::make_shared<Ends>()};
  Trainer interrupted(with({}, trainer));
  EXPECT_THROW(interrupted.fit(make_module<CountsSteps>(), {.train = tiny_loader()}), InterruptedError);
  Trainer resumed(with({}, {.max_steps = 3, .ckpt_path = "last"}));
  resumed.fit(make_module<CountsSteps>(), {.train = tiny_loader()});
  EXPECT_EQ(target_of("last"), "epoch=0-step=3");
}

TEST_F(ModelCheckpointInTraining, WhereNoneAreSavedTheLastStepsAreNot) {
  fit(with({.save_top_k = 0}));
  EXPECT_FALSE(fs::exists(folder()));
}

// Interrupts the validation of step 4.
class EndsTheValidation final : public Callback {
 public:
  void on_validation_batch_end(TrainerControl& trainer, const Batch&, int64_t) override {
    if (trainer.state().global_step == 4) std::raise(SIGTERM);
  }
};

TEST_F(ModelCheckpointInTraining, ASaveWhoseValidationASignalCutShortComesAfterThatOfTheNextRun) {
  TrainerOptions trainer{.val_check_interval = Batches(4), .ckpt_path = "last"};
  trainer.callbacks = {std::make_shared<EndsTheValidation>()};
  Trainer interrupted(with(by_steps(2, -1), trainer));
  EXPECT_THROW(interrupted.fit(make_module<CountsSteps>(), {.train = tiny_loader(), .val = tiny_loader(16)}),
               InterruptedError);
  EXPECT_EQ(steps_in("last"), 4);
  EXPECT_FALSE(fs::exists(folder() / "best"));
  fit(with(by_steps(2, -1), {.val_check_interval = Batches(4), .ckpt_path = "last"}));
  EXPECT_EQ(target_of("best"), "step=4-seen=4");
  EXPECT_EQ(steps_in("best"), 4);
  EXPECT_EQ(target_of("last"), "step=5-seen=nan");
}

}  // namespace
}  // namespace fulgur
