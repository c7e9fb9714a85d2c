#include "callbacks/model_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/fake_trainer_control.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::UnorderedElementsAre;

class ModelCheckpointTest : public ::testing::Test {
 protected:
  testing::TempDir dir;
  testing::FakeTrainerControl trainer{dir.path()};

  // Epochs that each log `val_acc` and end.
  void run_epochs(ModelCheckpoint& checkpoint, const std::vector<double>& accuracies) {
    for (const double accuracy : accuracies) {
      trainer.run_state.global_step += 10;
      trainer.log_epoch(Stage::validate, {{"val_acc", accuracy}});
      const size_t before = trainer.saved.size();
      checkpoint.on_train_epoch_end(trainer);
      if (trainer.saved.size() > before) checkpoint.on_checkpoint_saved(trainer, trainer.saved.back());
      ++trainer.run_state.epoch;
    }
  }

  std::vector<std::string> kept() const {
    std::vector<std::string> names;
    if (!fs::exists(dir.path() / "checkpoints")) return names;
    for (const auto& entry : fs::directory_iterator(dir.path() / "checkpoints"))
      names.push_back(entry.path().filename());
    return names;
  }
};

TEST_F(ModelCheckpointTest, KeepsTheNewestWithoutMonitor) {
  ModelCheckpoint checkpoint;
  run_epochs(checkpoint, {0.9, 0.5});
  EXPECT_THAT(kept(), ElementsAre("epoch=1-step=20"));
  EXPECT_EQ(checkpoint.best_model_path().filename(), "epoch=1-step=20");
}

TEST_F(ModelCheckpointTest, KeepsTheBestByMode) {
  ModelCheckpoint best({.monitor = "val_acc", .mode = "max"});
  run_epochs(best, {0.5, 0.9, 0.7});
  EXPECT_THAT(kept(), ElementsAre("epoch=1-step=20"));
  EXPECT_EQ(best.best_model_score(), 0.9);
  EXPECT_EQ(trainer.saved.size(), 2U);  // 0.7 was not worth writing
}

TEST_F(ModelCheckpointTest, KeepsTheBestKAndOfEqualsTheOlder) {
  ModelCheckpoint checkpoint({.monitor = "val_acc", .mode = "max", .save_top_k = 2});
  run_epochs(checkpoint, {0.5, 0.9, 0.9, 0.9, 0.4});
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=1-step=20", "epoch=2-step=30"));
  EXPECT_EQ(checkpoint.best_model_path().filename(), "epoch=1-step=20");
}

TEST_F(ModelCheckpointTest, NaNIsWorseThanEverything) {
  for (const char* mode : {"min", "max"}) {
    ModelCheckpoint checkpoint({.monitor = "val_acc", .mode = mode});
    run_epochs(checkpoint, {std::nan(""), 0.5, std::nan("")});
    EXPECT_EQ(checkpoint.best_model_score(), 0.5);
  }
}

TEST_F(ModelCheckpointTest, KeepsAllOrNoneIfAsked) {
  ModelCheckpoint none({.save_top_k = 0}), all({.save_top_k = -1});
  run_epochs(none, {0.1, 0.2});
  EXPECT_THAT(kept(), IsEmpty());
  EXPECT_TRUE(none.best_model_path().empty());
  run_epochs(all, {0.1, 0.2});
  EXPECT_EQ(kept().size(), 2U);
}

TEST_F(ModelCheckpointTest, SavesEveryNEpochs) {
  ModelCheckpoint checkpoint({.save_top_k = -1, .every_n_epochs = 2});
  run_epochs(checkpoint, {0.1, 0.2, 0.3, 0.4});
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=1-step=20", "epoch=3-step=40"));
}

TEST_F(ModelCheckpointTest, SavesOnlyInEpochsThatValidate) {
  trainer.run_state.has_validation = true;
  ModelCheckpoint checkpoint({.monitor = "val_acc"});
  for (const bool validates : {false, true, false}) {
    checkpoint.on_train_epoch_start(trainer);
    if (validates) {
      trainer.log_epoch(Stage::validate, {{"val_acc", 0.5}});
      checkpoint.on_validation_end(trainer);
    }
    checkpoint.on_train_epoch_end(trainer);
    ++trainer.run_state.epoch;
  }
  EXPECT_THAT(kept(), ElementsAre("epoch=1-step=0"));
  EXPECT_EQ(trainer.saved.size(), 1U);
}

TEST_F(ModelCheckpointTest, FilenameTakesMetricsAndFormats) {
  trainer.log_epoch(Stage::train, {{"loss/a", 2.0}});
  ModelCheckpoint checkpoint({.filename = "{epoch:02d}-{val_acc:.2f}-{loss/a}"});
  run_epochs(checkpoint, {0.123});
  EXPECT_THAT(kept(), ElementsAre("epoch=00-val_acc=0.12-loss_a=2"));
}

TEST_F(ModelCheckpointTest, DoesNotOverwriteAnotherRunsCheckpoint) {
  fs::create_directories(dir.path() / "checkpoints/epoch=0-step=10");
  ModelCheckpoint checkpoint;
  run_epochs(checkpoint, {0.1, 0.2});
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=0-step=10", "epoch=1-step=20"));
  EXPECT_EQ(trainer.saved.front().filename(), "epoch=0-step=10-v1");
}

TEST_F(ModelCheckpointTest, RefusesAMonitorThatNobodyLogged) {
  ModelCheckpoint checkpoint({.monitor = "val_accuracy"});
  EXPECT_THAT(message_of<SetupError>([&] { run_epochs(checkpoint, {0.1}); }),
              HasSubstr("unknown monitor 'val_accuracy'; known: val_acc"));
}

TEST_F(ModelCheckpointTest, RefusesBadOptions) {
  EXPECT_THAT(message_of<UsageError>([] { ModelCheckpoint c({.mode = "mx"}); }), HasSubstr("did you mean 'max'?"));
  EXPECT_THAT(message_of<UsageError>([] { ModelCheckpoint c({.save_top_k = 3}); }), HasSubstr("needs a monitor"));
  EXPECT_THAT(message_of<UsageError>([] { ModelCheckpoint c({.save_top_k = -2}); }), HasSubstr("at least -1"));
  EXPECT_THAT(message_of<UsageError>([] { ModelCheckpoint c({.filename = "{epoch"}); }), HasSubstr("without '}'"));
  EXPECT_THAT(message_of<UsageError>([] { ModelCheckpoint c({.filename = "{epoch:.2f}"}); }),
              HasSubstr("no format of a number"));
  ModelCheckpoint unknown({.filename = "{epohc}"});
  EXPECT_THAT(message_of<SetupError>([&] { run_epochs(unknown, {0.1}); }), HasSubstr("did you mean 'epoch'?"));
}

}  // namespace
}  // namespace fulgur
