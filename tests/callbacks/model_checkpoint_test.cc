#include "fulgur/callbacks/model_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/state.h"
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

  // Runs one epoch for each accuracy, which logs it as `val_acc`.
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

  fs::path folder() const { return dir.path() / "checkpoints"; }

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
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=1-step=20", "epoch=2-step=30"));  // the best and the newest
  EXPECT_EQ(best.best_model_score(), 0.9);
}

TEST_F(ModelCheckpointTest, KeepsTheNewestBesideTheBestUntilThereIsANewerOne) {
  ModelCheckpoint checkpoint({.monitor = "val_acc", .mode = "max"});
  run_epochs(checkpoint, {0.9, 0.5});
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=0-step=10", "epoch=1-step=20"));
  run_epochs(checkpoint, {0.4});
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=0-step=10", "epoch=2-step=30"));
  run_epochs(checkpoint, {0.95});
  EXPECT_THAT(kept(), ElementsAre("epoch=3-step=40"));
}

// A run may be a copy of another run, or follow it: neither removes the other's checkpoints.
TEST_F(ModelCheckpointTest, TakesUpOnlyWhatIsInItsOwnFolder) {
  ModelCheckpoint first;
  run_epochs(first, {0.1});
  fs::create_directory(dir.path() / "copy");
  fs::copy(dir.path() / "checkpoints", dir.path() / "copy/checkpoints", fs::copy_options::recursive);
  for (const char* run : {"copy", "next"}) {
    SCOPED_TRACE(run);
    const fs::path folder = dir.path() / run / "checkpoints";
    testing::FakeTrainerControl control(dir.path() / run);
    ModelCheckpoint checkpoint;
    checkpoint.setup(control, EntryPoint::fit);
    checkpoint.load_state(first.state());
    EXPECT_EQ(checkpoint.best_model_path(), fs::exists(folder) ? folder / "epoch=0-step=10" : fs::path());
    control.run_state.epoch = 1;
    checkpoint.on_train_epoch_end(control);
    checkpoint.on_checkpoint_saved(control, control.saved.back());
    EXPECT_FALSE(fs::exists(folder / "epoch=0-step=10"));
    EXPECT_THAT(kept(), ElementsAre("epoch=0-step=10"));
  }
}

TEST_F(ModelCheckpointTest, ReadsAnOlderStateWithWholePaths) {
  const fs::path own = dir.path() / "checkpoints/a", other = dir.path() / "other/checkpoints/a";
  fs::create_directories(own);
  fs::create_directories(other);
  State state;
  state.set("validated", false);
  state.set("last_step", int64_t{0});
  state.set("num_saved", int64_t{2});
  state.set("saved/0/path", other.string());
  state.set("saved/0/score", 0.9);
  state.set("saved/1/path", own.string());
  state.set("saved/1/score", 0.8);
  ModelCheckpoint checkpoint({.monitor = "val_acc", .mode = "max"});
  checkpoint.setup(trainer, EntryPoint::fit);
  checkpoint.load_state(state);
  EXPECT_EQ(checkpoint.best_model_path(), own);
  EXPECT_EQ(checkpoint.best_model_score(), 0.8);
}

TEST_F(ModelCheckpointTest, ForgetsScoresOfAnotherMonitorOrMode) {
  ModelCheckpoint lowest({.monitor = "val_acc", .mode = "min"}), highest({.monitor = "val_acc", .mode = "max"});
  run_epochs(lowest, {0.9});
  highest.setup(trainer, EntryPoint::fit);
  highest.load_state(lowest.state());
  EXPECT_TRUE(std::isnan(highest.best_model_score()));
  run_epochs(highest, {0.1});
  EXPECT_EQ(highest.best_model_score(), 0.1);
  EXPECT_THAT(kept(), ElementsAre("epoch=1-step=20"));
}

TEST_F(ModelCheckpointTest, KeepsTheBestKAndOfEqualsTheOlder) {
  ModelCheckpoint checkpoint({.monitor = "val_acc", .mode = "max", .save_top_k = 2});
  run_epochs(checkpoint, {0.5, 0.9, 0.9, 0.9, 0.4});
  EXPECT_THAT(kept(), UnorderedElementsAre("epoch=1-step=20", "epoch=2-step=30", "epoch=4-step=50"));
  EXPECT_EQ(checkpoint.best_model_path().filename(), "epoch=1-step=20");
  EXPECT_EQ(checkpoint.best_k_models(),
            (std::map<fs::path, double>{{folder() / "epoch=1-step=20", 0.9}, {folder() / "epoch=2-step=30", 0.9}}));
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
  for (const char* filename : {"a/b", "..", "../{epoch}", "{epoch:/>3}", ""}) {
    EXPECT_THAT(message_of<UsageError>([&] { ModelCheckpoint c({.filename = filename}); }), HasSubstr("as dirpath"));
  }
  EXPECT_THAT(message_of<UsageError>([] { ModelCheckpoint c({.every_n_epochs = 2, .every_n_train_steps = 5}); }),
              HasSubstr("every_n_epochs = 2 and every_n_train_steps = 5"));
  ModelCheckpoint unknown({.filename = "{epohc}"});
  EXPECT_THAT(message_of<SetupError>([&] { run_epochs(unknown, {0.1}); }), HasSubstr("did you mean 'epoch'?"));
}

}  // namespace
}  // namespace fulgur
