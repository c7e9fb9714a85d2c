// What the callbacks that print show: ProgressBar, ModelSummary, EvaluationTable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "fulgur/base/logging.h"
#include "fulgur/callbacks/evaluation_table.h"
#include "fulgur/callbacks/model_summary.h"
#include "fulgur/callbacks/progress_bar.h"
#include "tests/testing/fake_trainer_control.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using namespace std::chrono_literals;

class TerminalTest : public ::testing::Test {
 protected:
  testing::TempDir dir;
  testing::FakeTrainerControl trainer{dir.path()};
  std::ostringstream out;

  void train_epoch(ProgressBar& bar) {
    bar.on_train_epoch_start(trainer);
    for (trainer.run_state.batch_idx = 0; trainer.run_state.batch_idx < 4; ++trainer.run_state.batch_idx) {
      bar.on_train_batch_end(trainer, {}, {}, trainer.run_state.batch_idx);
    }
    bar.on_train_epoch_end(trainer);
  }
};

TEST_F(TerminalTest, ProgressBarPrintsALineAnEpochWhereThereIsNoTerminal) {
  trainer.run_state = {.epoch = 2, .num_batches = 4, .max_epochs = 10};
  trainer.log_epoch(Stage::train, {{"loss", 0.125}}, {.prog_bar = true});
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = false});
  train_epoch(bar);
  EXPECT_THAT(out.str(), MatchesRegex("Epoch 3/10 100% 4/4 \\| [0-9.]+[kM]? it/s \\| loss 0\\.125\n"));
}

TEST_F(TerminalTest, ProgressBarRedrawsItsLineOnATerminal) {
  trainer.run_state = {.num_batches = 4, .max_epochs = 1};
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = true});
  train_epoch(bar);
  EXPECT_THAT(out.str(), HasSubstr("\rEpoch 1/1  25% 1/4 |"));
  EXPECT_THAT(out.str(), HasSubstr("| ETA 0:00"));
  EXPECT_EQ(std::ranges::count(out.str(), '\r'), 5);
  EXPECT_EQ(std::ranges::count(out.str(), '\n'), 1);
}

TEST_F(TerminalTest, ProgressBarDrawsNoMoreOftenThanAsked) {
  trainer.run_state = {.num_batches = 4, .max_epochs = 1};
  ProgressBar bar({.refresh_interval = 1h, .out = &out, .is_terminal = true});
  train_epoch(bar);
  EXPECT_EQ(std::ranges::count(out.str(), '\r'), 1);  // at the end of the epoch
}

TEST_F(TerminalTest, ProgressBarGoesWithoutAnyBounds) {
  ProgressBar bar({.out = &out, .is_terminal = false});
  train_epoch(bar);
  EXPECT_THAT(out.str(), MatchesRegex("Epoch 1 4 \\| .* it/s\n"));
}

// What the terminal shows in the end: a carriage return moves the cursor to the beginning of the row to overwrite it,
// and a letter that finds no room in a row of 80 columns begins the next one.
std::string seen_on_terminal(const std::string& written) {
  constexpr size_t kColumns = 80;
  std::string screen, line;
  size_t column = 0;
  for (const char letter : written) {
    if (column == kColumns && letter != '\r' && letter != '\n') {
      screen += line + '\n';
      line.clear();
      column = 0;
    }
    if (letter == '\r') {
      column = 0;
    } else if (letter == '\n') {
      screen += line + '\n';
      line.clear();
      column = 0;
    } else {
      line.resize(std::max(line.size(), column + 1), ' ');
      line[column++] = letter;
    }
  }
  return screen + line;
}

// 99 of 100 batches were run before this process.
TEST_F(TerminalTest, ProgressBarOfAResumedEpochHasTheSpeedOfThisProcess) {
  trainer.run_state = {.num_batches = 200, .max_epochs = 1};
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = true});
  bar.on_train_epoch_start(trainer);
  std::this_thread::sleep_for(50ms);
  bar.on_train_batch_end(trainer, {}, {}, 99);
  EXPECT_THAT(seen_on_terminal(out.str()),
              MatchesRegex("Epoch 1/1  50% 100/200 \\| (1?[0-9]\\.[0-9]+|20\\.0) it/s \\| .*"));
}

TEST_F(TerminalTest, ALineOfTheLogFindsTheProgressLineCleared) {
  trainer.run_state = {.num_batches = 4, .max_epochs = 1};
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = true});
  bar.on_train_epoch_start(trainer);
  bar.on_train_batch_end(trainer, {}, {}, 0);
  EXPECT_THAT(seen_on_terminal(out.str()), HasSubstr("Epoch 1/1  25% 1/4"));
  ::testing::internal::CaptureStderr();
  log_warning("slow");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "warning: slow\n");
  EXPECT_THAT(seen_on_terminal(out.str()), MatchesRegex(" *"));
  EXPECT_EQ(out.str().back(), '\r');  // the warning begins at the first column
  bar.on_train_batch_end(trainer, {}, {}, 1);
  EXPECT_THAT(seen_on_terminal(out.str()), HasSubstr("Epoch 1/1  50% 2/4"));
}

TEST_F(TerminalTest, ALineThatIsWiderThanTheTerminalIsRedrawnInOneRowAndEndsWhole) {
  trainer.run_state = {.num_batches = 4, .max_epochs = 1};
  const std::string first = "a_metric_with_a_name_that_takes_many_columns", second = "b_" + first, third = "c_" + first;
  trainer.log_epoch(Stage::train, {{first, 0.125}, {second, 0.25}, {third, 0.5}}, {.prog_bar = true});
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = true, .columns = 80});
  bar.on_train_epoch_start(trainer);
  for (int64_t i = 0; i < 3; ++i) bar.on_train_batch_end(trainer, {}, {}, i);
  const std::string seen = seen_on_terminal(out.str());
  EXPECT_THAT(seen, MatchesRegex("Epoch 1/1  75% 3/4 [^\n]*a_metric_with[^\n]*"));
  EXPECT_LT(seen.size(), 80u);
  ::testing::internal::CaptureStderr();
  log_warning("slow");
  ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(seen_on_terminal(out.str()), MatchesRegex(" *"));
  trainer.run_state.batch_idx = 4;
  bar.on_train_epoch_end(trainer);
  std::string rows = seen_on_terminal(out.str());
  EXPECT_GT(std::ranges::count(rows, '\n'), 2);
  std::erase(rows, '\n');
  EXPECT_THAT(rows, MatchesRegex("Epoch 1/1 100% 4/4 \\| .* \\| " + first + " 0.125 \\| " + second + " 0.25 \\| " +
                                 third + " 0.5 *"));
}

TEST_F(TerminalTest, ValidationWithinFitHasALineThatIsGoneAfterwards) {
  trainer.run_state = {.stage = Stage::validate, .num_batches = 4};
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = true});
  bar.on_validation_start(trainer);
  bar.on_validation_batch_start(trainer, {}, 0);
  bar.on_validation_batch_end(trainer, {}, 0);
  EXPECT_THAT(seen_on_terminal(out.str()), MatchesRegex("Validation  25% 1/4 \\| [0-9.]+[kM]? it/s \\| ETA 0:00"));
  trainer.metric_log.set_dataloader(1);
  bar.on_validation_batch_start(trainer, {}, 0);
  bar.on_validation_batch_end(trainer, {}, 0);
  EXPECT_THAT(seen_on_terminal(out.str()), HasSubstr("Validation, loader 1  25% 1/4"));
  bar.on_validation_end(trainer);
  EXPECT_THAT(seen_on_terminal(out.str()), MatchesRegex(" *"));
}

TEST_F(TerminalTest, TestAndPredictionLeaveTheirLastLine) {
  ProgressBar bar({.refresh_interval = 1h, .out = &out, .is_terminal = true});
  trainer.run_state = {.entry_point = EntryPoint::test, .stage = Stage::test, .num_batches = 2};
  for (int64_t i = 0; i < 2; ++i) {
    bar.on_test_batch_start(trainer, {}, i);
    bar.on_test_batch_end(trainer, {}, i);
  }
  bar.on_test_end(trainer);
  EXPECT_THAT(seen_on_terminal(out.str()), MatchesRegex("Test 100% 2/2 \\| [0-9.]+[kM]? it/s *\n"));
  out.str("");
  trainer.run_state = {.entry_point = EntryPoint::predict, .stage = Stage::predict, .num_batches = 1};
  bar.on_predict_batch_start(trainer, {}, 0);
  bar.on_predict_batch_end(trainer, {}, {}, 0);
  bar.on_predict_end(trainer);
  EXPECT_THAT(seen_on_terminal(out.str()), MatchesRegex("Prediction 100% 1/1 \\| [0-9.]+[kM]? it/s *\n"));
}

TEST_F(TerminalTest, EvaluationDrawsNothingWhereThereIsNoTerminal) {
  ProgressBar bar({.refresh_interval = 0ms, .out = &out, .is_terminal = false});
  trainer.run_state = {.entry_point = EntryPoint::test, .stage = Stage::test, .num_batches = 1};
  bar.on_test_batch_start(trainer, {}, 0);
  bar.on_test_batch_end(trainer, {}, 0);
  bar.on_test_end(trainer);
  EXPECT_EQ(out.str(), "");
}

TEST_F(TerminalTest, ModelSummaryCountsParameters) {
  trainer.tiny.out->bias.set_requires_grad(false);
  trainer.tiny.register_module("again", trainer.tiny.hidden.ptr());
  ModelSummary({.out = &out}).on_fit_start(trainer);
  EXPECT_EQ(out.str(),
            "single_device on cpu\n\n"
            "name    type    params\n"
            "----------------------\n"
            "hidden  Linear      40\n"
            "out     Linear       9\n"
            "again   Linear      40\n"
            "----------------------\n"
            "48 trainable, 1 frozen\n\n"
            "MB on each rank\n\n");
}

TEST_F(TerminalTest, ModelSummarySaysWhatAStepIs) {
  trainer.run_state = {.num_batches = 10, .batch_size = 32, .estimated_stepping_batches = 50};
  ModelSummary({.out = &out}).on_fit_start(trainer);
  EXPECT_THAT(out.str(), ::testing::EndsWith("\n10 steps in an epoch, 50 in all, each of 32 samples\n\n"));
  trainer.ranks = 2;
  trainer.accumulate = 4;
  ModelSummary({.out = &out}).on_fit_start(trainer);
  EXPECT_THAT(out.str(), ::testing::EndsWith("\n3 steps in an epoch, 50 in all, each of 4 x 2 x 32 = 256 samples\n\n"));
}

TEST_F(TerminalTest, EvaluationTableShowsAllDigitsOfAFloat) {
  trainer.run_state = {.entry_point = EntryPoint::test, .stage = Stage::test};
  trainer.log_epoch(Stage::test, {{"test_acc", 0.1F + 0.2F}, {"a", 1}});
  EvaluationTable({.out = &out}).on_test_end(trainer);
  EXPECT_EQ(out.str(),
            "----------------------\n"
            "metric    test\n"
            "----------------------\n"
            "a         1\n"
            "test_acc  0.300000012\n"
            "----------------------\n");
}

TEST_F(TerminalTest, EvaluationTableIsSilentAboutValidationDuringFit) {
  trainer.log_epoch(Stage::validate, {{"val_acc", 1}});
  trainer.run_state = {.entry_point = EntryPoint::fit, .stage = Stage::validate};
  EvaluationTable table({.out = &out});
  table.on_validation_end(trainer);
  EXPECT_EQ(out.str(), "");
  trainer.run_state.entry_point = EntryPoint::validate;
  table.on_validation_end(trainer);
  EXPECT_THAT(out.str(), HasSubstr("val_acc"));
}

}  // namespace
}  // namespace fulgur
