#include "fulgur/reports/metric_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

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

// Batches of validation have a count of their own, which is not how far the run is.
TEST(MetricTable, RowsOfEvaluatedBatchesCountNoSteps) {
  const std::string header = "epoch,step,train_loss_step,val_acc_step/dataloader_idx_1,val_loss_epoch,val_loss_step\n";
  const std::string training = "0,9,0.5,,,\n";
  const auto last_step = [&](const std::string& rows) { return parse_metric_table(header + rows, "m").last_step; };
  EXPECT_EQ(last_step(training + "0,49,,0.5,,0.25\n0,99,,,,0.125\n"), 9);
  EXPECT_EQ(last_step(training + "0,99,,,,0.125\n0,11,,,0.125,\n"), 11);
  EXPECT_EQ(last_step(training + "0,19,0.25,,,0.125\n"), 19);  // one row of both
  EXPECT_EQ(last_step("0,99,,,,0.125\n"), 0);
  EXPECT_EQ(parse_metric_table(header + training + "0,99,,,,0.125\n", "m").find("val_loss_step")->points[0].step, 99);
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

// A file that is written by and by, and a reader that follows it.
class Following {
 public:
  void write(const std::string& text) { std::ofstream(file_, std::ios::binary | std::ios::trunc) << text; }
  void replace(const std::string& text) {  // as the CSVLogger does for a new column
    std::ofstream(folder_.path() / "next", std::ios::binary) << text;
    std::filesystem::rename(folder_.path() / "next", file_);
  }

  // Reads, and compares with what somebody sees who reads the whole file.
  void expect_as_whole(const char* where) {
    table_ = reader_.read(std::move(table_));
    const MetricTable whole = read_metric_table(file_);
    EXPECT_EQ(table_.num_rows, whole.num_rows) << where;
    EXPECT_EQ(table_.last_step, whole.last_step) << where;
    EXPECT_EQ(table_.last_epoch, whole.last_epoch) << where;
    EXPECT_EQ(table_.has_torn_row, whole.has_torn_row) << where;
    ASSERT_EQ(table_.curves.size(), whole.curves.size()) << where;
    for (size_t i = 0; i < whole.curves.size(); ++i) {
      const auto &points = table_.curves[i].points, &expected = whole.curves[i].points;
      EXPECT_EQ(table_.curves[i].name, whole.curves[i].name) << where;
      ASSERT_EQ(points.size(), expected.size()) << where;
      for (size_t j = 0; j < points.size(); ++j) {
        EXPECT_EQ(points[j].step, expected[j].step) << where;
        EXPECT_THAT(points[j].value, ::testing::NanSensitiveDoubleEq(expected[j].value)) << where;
      }
    }
  }
  int64_t num_bytes_read() const { return reader_.num_bytes_read(); }

 private:
  testing::TempDir folder_;
  std::filesystem::path file_ = folder_.path() / "metrics.csv";
  GrowingMetricFile reader_{file_};
  MetricTable table_{};
};

TEST(GrowingMetricFile, EveryPartOfAFileIsReadAsItIs) {
  const std::string text = "epoch,step,\"a\nb\",loss\n0,0,1,\n0,1,,2.5\n0,2,3,nan\n1,3,4,4\n";
  Following file;
  for (size_t length = 1; length <= text.size(); ++length) {
    file.write(text.substr(0, length));
    file.expect_as_whole(std::to_string(length).c_str());
  }
}

TEST(GrowingMetricFile, OnlyTheLastRowAndWhatIsNewAreRead) {
  Following file;
  std::string text = "epoch,step,loss\n";
  for (int i = 0; i < 10000; ++i) text += "0," + std::to_string(i) + ",0.5\n";
  file.write(text);
  file.expect_as_whole("first");
  EXPECT_EQ(file.num_bytes_read(), static_cast<int64_t>(text.size()));
  const std::string last = "0,9999,0.5\n", added = "0,10000,0.25\n0,10001,0.125\n";
  file.write(text + added);
  file.expect_as_whole("added");
  EXPECT_EQ(file.num_bytes_read(), static_cast<int64_t>(last.size() + added.size()));
}

TEST(GrowingMetricFile, WhatChangesBehindItsBackIsReadAnew) {
  Following file;
  file.write("epoch,step,loss,val\n0,0,1,\n0,1,2,\n");
  file.expect_as_whole("begin");
  file.write("epoch,step,loss,val\n0,0,1,\n0,1,2,7\n");
  file.expect_as_whole("the last row got a value");
  file.replace("epoch,step,loss,lr,val\n0,0,1,,\n0,1,2,,7\n0,2,3,4,\n");
  file.expect_as_whole("a column was added");
  file.write("epoch,step,loss,lr,val\n0,0,1,,\n");
  file.expect_as_whole("a run that resumes has cut the file");
  file.write("epoch,step,loss,lr,val\n0,0,1,,\n0,1,5,,8\n0,2,6,4,\n0,3,6,4,\n");
  file.expect_as_whole("the run that resumed goes on");
  file.write("epoch,step,loss,lr,val\n0,0,1,,\n0,1,9,,8\n0,2,6,4,\n0,3,6,4,\n0,4,6,4,\n");
  file.expect_as_whole("another run has resumed meanwhile");
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
