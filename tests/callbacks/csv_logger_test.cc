#include "fulgur/callbacks/csv_logger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/base/state.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/errors.h"
#include "tests/testing/fake_trainer_control.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using testing::read_file;

// Bytes that this process has passed to write(), as the system counts them.
int64_t num_bytes_written() {
  const std::string text = read_file("/proc/self/io");
  const std::string label = "wchar: ";
  return std::stoll(text.substr(text.find(label) + label.size()));
}

class CSVLoggerTest : public ::testing::Test {
 protected:
  testing::TempDir dir;
  testing::FakeTrainerControl trainer{dir.path()};
  CSVLogger logger;

  std::string written() { return read_file(dir.path() / "metrics.csv"); }

  State state_of(const std::string& file, int64_t num_rows = 1) {
    State state;
    state.set("num_rows", num_rows);
    state.set("file", file);
    return state;
  }
  void resume(CSVLogger& resumed, const State& state) {
    resumed.setup(trainer, EntryPoint::fit);
    resumed.load_state(state);
    resumed.on_fit_start(trainer);
  }
};

TEST_F(CSVLoggerTest, WritesARowAsSoonAsItComes) {
  logger.on_metrics(trainer, {{"train_loss", 0.5}}, 49);
  EXPECT_EQ(written(), "epoch,step,train_loss\n0,49,0.5\n");
  logger.on_metrics(trainer, {{"train_loss", 0.25}}, 99);
  EXPECT_EQ(written(), "epoch,step,train_loss\n0,49,0.5\n0,99,0.25\n");
}

TEST_F(CSVLoggerTest, ANewMetricGetsAColumnAndEmptyCellsAbove) {
  logger.on_metrics(trainer, {{"train_loss", 0.5}}, 0);
  trainer.run_state.epoch = 1;
  logger.on_metrics(trainer, {{"acc", 1}}, 3);
  logger.on_metrics(trainer, {{"train_loss", 2}}, 4);
  EXPECT_EQ(written(), "epoch,step,acc,train_loss\n0,0,,0.5\n1,3,1,\n1,4,,2\n");
}

TEST_F(CSVLoggerTest, MetricsOfOneStepShareARow) {
  logger.on_metrics(trainer, {{"a", 1}}, 7);
  logger.on_metrics(trainer, {{"b", 2}}, 7);
  EXPECT_EQ(written(), "epoch,step,a,b\n0,7,1,2\n");
}

TEST_F(CSVLoggerTest, KeepsAllDigitsOfAFloat) {
  const float value = 0.1F + 0.2F;
  logger.on_metrics(trainer, {{"x", value}}, 0);
  const std::string text = written();
  EXPECT_EQ(std::stof(text.substr(text.rfind(',') + 1)), value);
}

TEST_F(CSVLoggerTest, QuotesANameWithAComma) {
  logger.on_metrics(trainer, {{"a,\"b\"", 1}}, 0);
  EXPECT_EQ(written(), "epoch,step,\"a,\"\"b\"\"\"\n0,0,1\n");
}

TEST_F(CSVLoggerTest, SaysWhichFileCannotBeWritten) {
  CSVLogger elsewhere({.file = dir.path() / "missing/metrics.csv"});
  EXPECT_THAT(testing::message_of<std::runtime_error>([&] { elsewhere.on_metrics(trainer, {{"a", 1}}, 0); }),
              ::testing::HasSubstr("missing/metrics.csv': No such file or directory"));
}

TEST_F(CSVLoggerTest, AMetricNamedEpochTakesItsColumn) {
  logger.on_metrics(trainer, {{"a", 1}, {"epoch", 5}}, 7);
  EXPECT_EQ(written(), "epoch,step,a\n5,7,1\n");
}

TEST_F(CSVLoggerTest, GoesOnBehindTheRowsOfTheCheckpoint) {
  logger.on_metrics(trainer, {{"a", 1}}, 0);
  logger.on_metrics(trainer, {{"\"b\",", 2}}, 1);
  const State saved = logger.state();
  logger.on_metrics(trainer, {{"a", 3}}, 2);  // a row after the checkpoint, which the resumed run replaces
  CSVLogger resumed;
  resume(resumed, saved);
  resumed.on_metrics(trainer, {{"a", 4}}, 2);
  EXPECT_EQ(written(), "epoch,step,\"\"\"b\"\",\",a\n0,0,,1\n0,1,2,\n0,2,,4\n");
}

// A run loads its own state when a validation is cut short, and a resumed run may save before its first row.
TEST_F(CSVLoggerTest, TheRowsStayKnownUntilTheNextOneIsWritten) {
  for (const bool has_own_file : {false, true}) {
    const fs::path file = dir.path() / (has_own_file ? "own.csv" : "metrics.csv");
    const CSVLogger::Options options{.file = has_own_file ? file : fs::path()};
    CSVLogger first(options), second(options), third(options);
    first.on_metrics(trainer, {{"a", 1}}, 0);
    first.on_metrics(trainer, {{"a", 2}}, 1);
    first.load_state(first.state());
    resume(second, first.state());
    second.load_state(second.state());
    resume(third, second.state());
    third.on_metrics(trainer, {{"a", 3}}, 2);
    EXPECT_EQ(read_file(file), "epoch,step,a\n0,0,1\n0,1,2\n0,2,3\n");
  }
}

TEST_F(CSVLoggerTest, AnotherRunInTheSameFolderHasAFileOfItsOwn) {
  logger.on_metrics(trainer, {{"a", 1}}, 0);
  CSVLogger other;
  other.setup(trainer, EntryPoint::fit);
  other.on_fit_start(trainer);
  other.on_metrics(trainer, {{"a", 2}}, 0);
  EXPECT_EQ(written(), "epoch,step,a\n0,0,1\n");
  EXPECT_EQ(other.file().filename(), "metrics-v1.csv");
}

// A checkpoint may come from anywhere, so it cannot choose a file outside the run's folder.
TEST_F(CSVLoggerTest, AStateNamesNoFileOutsideTheRun) {
  const fs::path run = dir.path() / "runs/a";
  fs::create_directories(run);
  testing::FakeTrainerControl control(run);
  for (const std::string& name : {(dir.path() / "absolute").string(), std::string("../../climbing")}) {
    const fs::path victim = dir.path() / fs::path(name).filename();
    std::ofstream(victim) << "mine";
    CSVLogger resumed;
    resumed.setup(control, EntryPoint::fit);
    resumed.load_state(state_of(name));
    resumed.on_fit_start(control);
    resumed.on_metrics(control, {{"a", 1}}, 0);
    EXPECT_EQ(read_file(victim), "mine") << name;
    EXPECT_EQ(read_file(run / victim.filename()), "epoch,step,a\n0,0,1\n") << name;
  }
  for (const char* name : {".", "..", "../..", "metrics.csv/"}) {
    CSVLogger resumed;
    EXPECT_THAT(testing::message_of<CheckpointError>([&] { resumed.load_state(state_of(name)); }),
                ::testing::HasSubstr(name));
  }
}

TEST_F(CSVLoggerTest, OverwritesNoFileThatIsNotItsOwn) {
  for (const std::string text : {"mine\n", "mine", "epoch,loss\n", "epoch\n"}) {
    std::ofstream(dir.path() / "metrics.csv") << text;
    CSVLogger resumed;
    EXPECT_THAT(testing::message_of<SetupError>([&] { resume(resumed, state_of("metrics.csv")); }),
                ::testing::HasSubstr("metrics.csv"));
    EXPECT_EQ(written(), text);
  }
}

// The file may belong to an earlier run of the same name, which has nothing to do with this one.
TEST_F(CSVLoggerTest, ARunThatHadNoRowsYetStartsAFileOfItsOwn) {
  logger.on_metrics(trainer, {{"a", 1}}, 0);
  const State before_its_first_row = CSVLogger().state();
  CSVLogger resumed;
  resume(resumed, before_its_first_row);
  resumed.on_metrics(trainer, {{"a", 2}}, 0);
  EXPECT_EQ(written(), "epoch,step,a\n0,0,1\n");
  EXPECT_EQ(resumed.file().filename(), "metrics-v1.csv");
}

TEST_F(CSVLoggerTest, ADiskThatIsFullCostsRowsAndOneWarning) {
  const std::string a(1000, 'a');  // the file is larger than the warning, which goes to a file, too
  logger.on_metrics(trainer, {{a, 1}, {"b", 1}}, 0);
  logger.on_metrics(trainer, {{a, 2}}, 1);
  const std::string before = written();
  ::testing::internal::CaptureStderr();
  {
    const testing::FileSizeLimit full_disk(static_cast<rlim_t>(before.size()));
    logger.on_metrics(trainer, {{"b", 3}}, 1);  // adds a cell to the last row
    EXPECT_EQ(written(), before);
    logger.on_metrics(trainer, {{"c", 3}}, 1);  // adds a column
    logger.on_metrics(trainer, {{a, 3}}, 2);    // adds a row
    EXPECT_EQ(written(), before);
  }
  const std::string warned = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(warned, ::testing::HasSubstr("CSVLogger: cannot write"));
  EXPECT_EQ(std::ranges::count(warned, '\n'), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);  // no temporary file is left
  logger.on_metrics(trainer, {{"c", 4}}, 3);
  EXPECT_EQ(written(), "epoch,step," + a + ",b,c\n0,0,1,1,\n0,1,2,,\n0,3,,,4\n");
}

TEST_F(CSVLoggerTest, WritesEachRowOnceOrTwiceHoweverManyThereAre) {
  logger.on_metrics(trainer, {{"train_loss", 0}, {"val_loss", 0}}, 0);
  const int64_t before = num_bytes_written();
  for (int64_t step = 1; step <= 300; ++step) {
    logger.on_metrics(trainer, {{"train_loss", 0.5}}, step);
    logger.on_metrics(trainer, {{"val_loss", 0.25}}, step);
  }
  EXPECT_LT(num_bytes_written() - before, 3 * static_cast<int64_t>(written().size()));
  EXPECT_THAT(written(), ::testing::EndsWith("\n0,299,0.5,0.25\n0,300,0.5,0.25\n"));
}

TEST_F(CSVLoggerTest, AValueThatIsLoggedAgainReplacesALongerOne) {
  logger.on_metrics(trainer, {{"a", 0.123456789}}, 0);
  logger.on_metrics(trainer, {{"a", 1}}, 0);
  EXPECT_EQ(written(), "epoch,step,a\n0,0,1\n");
}

// The machine may have stopped in the middle of a row.
TEST_F(CSVLoggerTest, GoesOnBehindTheLastWholeRow) {
  logger.on_metrics(trainer, {{"a", 1}}, 0);
  logger.on_metrics(trainer, {{"a", 2}}, 1);
  const State saved = logger.state();
  std::ofstream(dir.path() / "metrics.csv", std::ios::trunc) << "epoch,step,a\n0,0,1\n0,1,2.";
  CSVLogger resumed;
  resume(resumed, saved);
  resumed.on_metrics(trainer, {{"a", 3}}, 2);
  EXPECT_EQ(written(), "epoch,step,a\n0,0,1\n0,2,3\n");
}

TEST_F(CSVLoggerTest, AShorterFileOfAnotherRunIsLeftAlone) {
  for (const int64_t step : {0, 1, 2}) logger.on_metrics(trainer, {{"a", 1}}, step);
  const State saved = logger.state();
  const std::string of_another = "epoch,step,a\n0,0,5\n0,1,1\n";
  std::ofstream(dir.path() / "metrics.csv", std::ios::trunc) << of_another;
  CSVLogger resumed;
  resume(resumed, saved);
  resumed.on_metrics(trainer, {{"a", 3}}, 3);
  EXPECT_EQ(written(), of_another);
  EXPECT_EQ(read_file(dir.path() / "metrics-v1.csv"), "epoch,step,a\n0,3,3\n");
}

TEST_F(CSVLoggerTest, AStateOfAnOlderVersionDoesNotKnowTheFirstRow) {
  for (const int64_t step : {0, 1, 2}) logger.on_metrics(trainer, {{"a", 1}}, step);
  State saved = logger.state();
  for (const char* name : {"epoch", "step", "metrics/a"}) saved.erase(std::string("first_row/") + name);
  EXPECT_TRUE(saved.child("first_row").empty());
  std::ofstream(dir.path() / "metrics.csv", std::ios::trunc) << "epoch,step,a\n0,0,1\n0,1,1\n";
  CSVLogger resumed;
  resume(resumed, saved);
  resumed.on_metrics(trainer, {{"a", 3}}, 3);
  EXPECT_EQ(written(), "epoch,step,a\n0,0,1\n0,1,1\n0,3,3\n");
}

// A run that has resumed twice knows the first row from the file.
TEST_F(CSVLoggerTest, TheFirstRowIsKnownAfterEachResume) {
  for (const int64_t step : {0, 1}) logger.on_metrics(trainer, {{"a", double(step)}}, step);
  CSVLogger resumed;
  resume(resumed, logger.state());
  resumed.on_metrics(trainer, {{"b", 3}}, 2);
  const State first = resumed.state().child("first_row");
  EXPECT_EQ(first.get<std::string>("step"), "0");
  EXPECT_EQ(first.get<std::string>("metrics/a"), "0");
}

TEST_F(CSVLoggerTest, GoesOnInTheRowThatTheCheckpointEndsWith) {
  logger.on_metrics(trainer, {{"a", 1}}, 0);
  const State saved = logger.state();
  CSVLogger resumed;
  resume(resumed, saved);
  resumed.on_metrics(trainer, {{"b", 2}}, 0);
  resumed.on_metrics(trainer, {{"a", 3}}, 1);
  EXPECT_EQ(written(), "epoch,step,a,b\n0,0,1,2\n0,1,3,\n");
}

}  // namespace
}  // namespace fulgur
