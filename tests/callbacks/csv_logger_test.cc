#include "callbacks/csv_logger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/testing/errors.h"
#include "tests/testing/fake_trainer_control.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using testing::read_file;

class CSVLoggerTest : public ::testing::Test {
 protected:
  testing::TempDir dir;
  testing::FakeTrainerControl trainer{dir.path()};
  CSVLogger logger;

  std::string written() { return read_file(dir.path() / "metrics.csv"); }
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
  logger.on_metrics(trainer, {{"a", 3}}, 2);  // what was lost comes again
  CSVLogger resumed;
  resumed.setup(trainer, EntryPoint::fit);
  resumed.load_state(saved);
  resumed.on_fit_start(trainer);
  resumed.on_metrics(trainer, {{"a", 4}}, 2);
  EXPECT_EQ(written(), "epoch,step,\"\"\"b\"\",\",a\n0,0,,1\n0,1,2,\n0,2,,4\n");
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

}  // namespace
}  // namespace fulgur
