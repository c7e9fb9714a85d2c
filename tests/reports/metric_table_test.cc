#include "fulgur/reports/metric_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

std::string refusal(const std::string& text) {
  return message_of<UsageError>([&] { parse_metric_table(text, "metrics.csv"); });
}

TEST(MetricTable, CellsBecomePointsOfTheirColumn) {
  const MetricTable table =
      parse_metric_table("epoch,step,loss,val\n0,4,0.5,\n0,9,,-1e-3\n1,14,0.25,2\n", "metrics.csv");
  ASSERT_EQ(table.curves.size(), 2u);
  ASSERT_EQ(table.find("loss")->points.size(), 2u);
  EXPECT_EQ(table.find("loss")->points[1].step, 14);
  EXPECT_EQ(table.find("loss")->points[1].value, 0.25);
  EXPECT_EQ(table.find("val")->points[0].step, 9);
  EXPECT_EQ(table.find("val")->points[0].value, -1e-3);
  EXPECT_EQ(table.find("other"), nullptr);
  EXPECT_EQ(table.num_rows, 3);
  EXPECT_EQ(table.last_epoch, 1);
  EXPECT_EQ(table.last_step, 14);
  EXPECT_FALSE(table.has_torn_row);
}

TEST(MetricTable, ReadsWhatIsNotFinite) {
  const MetricTable table =
      parse_metric_table("epoch,step,loss\n0,0,nan\n0,1,inf\n0,2,-inf\n0,3,-nan\n", "metrics.csv");
  const auto& points = table.find("loss")->points;
  ASSERT_EQ(points.size(), 4u);
  EXPECT_TRUE(std::isnan(points[0].value));
  EXPECT_EQ(points[1].value, HUGE_VAL);
  EXPECT_EQ(points[2].value, -HUGE_VAL);
  EXPECT_TRUE(std::isnan(points[3].value));
}

TEST(MetricTable, NamesMayHoldCommasQuotesAndNewlines) {
  const MetricTable table =
      parse_metric_table("epoch,step,\"a,b\",\"say \"\"hi\"\"\",\"two\nlines\"\n0,0,1,2,3\n", "metrics.csv");
  ASSERT_EQ(table.curves.size(), 3u);
  EXPECT_EQ(table.curves[0].name, "a,b");
  EXPECT_EQ(table.curves[1].name, "say \"hi\"");
  EXPECT_EQ(table.curves[2].name, "two\nlines");
  EXPECT_EQ(table.curves[2].points[0].value, 3);
}

// Whatever has been written when the file is read, the whole rows are there.
TEST(MetricTable, ALastRowThatIsIncompleteIsLeftOut) {
  const std::string text = "epoch,step,loss\n0,1,0.125\n0,2,0.25\n";
  for (size_t length = 0; length <= text.size(); ++length) {
    const MetricTable table = parse_metric_table(text.substr(0, length), "metrics.csv");
    const int64_t num_rows = length >= text.size() ? 2 : length >= text.size() - 9 ? 1 : 0;
    EXPECT_EQ(table.num_rows, num_rows) << length;
    const bool is_whole = length > 0 && text[length - 1] == '\n';
    EXPECT_EQ(table.has_torn_row, !is_whole) << length;
  }
  EXPECT_EQ(parse_metric_table("epoch,step,loss\n0,1,0.5\n0,2\n", "metrics.csv").num_rows, 1);
}

TEST(MetricTable, FilesOfOtherProgramsAreRefusedWithTheLine) {
  EXPECT_EQ(refusal("time,loss\n0,1\n"),
            "'metrics.csv' was not written by a CSVLogger: its first line does not begin with epoch,step");
  EXPECT_THAT(refusal("epoch,steps,loss\n0,1,2\n"), HasSubstr("does not begin with epoch,step"));
  EXPECT_THAT(refusal(std::string(100, '\0')), HasSubstr("does not begin with epoch,step"));
  EXPECT_THAT(refusal("epoch,step,loss\n0,1\n0,2,3\n"),
              HasSubstr("line 2 has fewer cells than the header, which has 3"));
  EXPECT_THAT(refusal("epoch,step,loss\n0,1,2,3\n0,2,3\n"),
              HasSubstr("line 2 has more cells than the header, which has 3"));
  EXPECT_THAT(refusal("epoch,step,loss\n0,0,1\n0,1,high\n0,2,3\n"), HasSubstr("line 3 has a cell that is no number"));
  EXPECT_THAT(refusal("epoch,step,loss\nx,1,2\n0,2,3\n"), HasSubstr("line 2 does not begin with an epoch and a step"));
  EXPECT_THAT(refusal("epoch,step,loss\n\n0,2,3\n"), HasSubstr("line 2 does not begin with an epoch and a step"));
}

TEST(MetricTable, AFileThatCannotBeReadIsNamed) {
  const testing::TempDir folder;
  const auto message = message_of<UsageError>([&] { read_metric_table(folder.path() / "metrics.csv"); });
  EXPECT_THAT(message, HasSubstr("metrics.csv' cannot be read: No such file"));
}

TEST(MetricTable, MetricsOfTheMachineAreKnownByTheirNames) {
  for (const char* name : {"train/samples_per_sec", "train/mfu", "train/data_wait", "device/host_rss_mib"}) {
    EXPECT_TRUE(measures_machine(name)) << name;
  }
  for (const char* name : {"train_loss", "val_acc", "lr-AdamW", "grad_norm"})
    EXPECT_FALSE(measures_machine(name)) << name;
  EXPECT_EQ(kind_of_metric("val_loss"), MetricKind::loss);
  EXPECT_EQ(kind_of_metric("lr-AdamW/pg1"), MetricKind::optimization);
}

}  // namespace
}  // namespace fulgur
