#include "fulgur/reports/compare_runs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "fulgur/reports/metric_table.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

MetricTable table(const std::string& rows) { return parse_metric_table("epoch,step," + rows, "metrics.csv"); }

TEST(CompareRuns, EqualRunsAreEqualAlsoWhereTheyAreNotFinite) {
  const MetricTable run = table("loss,val\n0,0,0.5,\n0,1,nan,2\n0,2,inf,\n");
  const RunComparison comparison = compare_runs(run, run);
  EXPECT_TRUE(comparison.are_equal());
  EXPECT_EQ(comparison.num_values, 4);
  EXPECT_EQ(to_text(comparison, "a", "b"), "a and b have the same 4 values of loss, val\n");
}

TEST(CompareRuns, FindsTheEarliestAndTheLargestDifference) {
  const RunComparison comparison = compare_runs(table("acc,loss\n0,0,1,5\n0,1,1,5\n0,2,1,5\n0,3,2,5\n"),
                                                table("acc,loss\n0,0,1,5\n0,1,1,5.5\n0,2,1,7\n0,3,1,5\n"));
  ASSERT_EQ(comparison.different.size(), 2u);
  EXPECT_EQ(comparison.different[0].earliest.metric, "loss");
  EXPECT_EQ(comparison.different[0].earliest.step, 1);
  EXPECT_EQ(comparison.different[0].largest->step, 2);
  EXPECT_EQ(comparison.different[0].largest->amount(), 2);
  EXPECT_EQ(comparison.different[0].num_different, 2);
  EXPECT_EQ(comparison.different[1].earliest.step, 3);
  EXPECT_THAT(to_text(comparison, "a", "b"),
              HasSubstr("a and b differ from step 1 on: loss is 5 and 5.5, a difference of 0.5\n"));
}

TEST(CompareRuns, AValueThatOneRunLacksIsADifference) {
  const RunComparison shorter = compare_runs(table("loss\n0,0,1\n0,1,2\n"), table("loss\n0,0,1\n"));
  ASSERT_EQ(shorter.different.size(), 1u);
  EXPECT_EQ(shorter.different[0].earliest.step, 1);
  EXPECT_FALSE(shorter.different[0].earliest.second);
  EXPECT_FALSE(shorter.different[0].largest);
  EXPECT_THAT(to_text(shorter, "a", "b"), HasSubstr("loss is 2 and missing\n"));
  const RunComparison hole = compare_runs(table("loss\n0,0,1\n0,2,3\n"), table("loss\n0,0,1\n0,1,2\n0,2,3\n"));
  EXPECT_EQ(hole.different.at(0).earliest.step, 1);
  EXPECT_EQ(hole.different.at(0).num_missing, 1);
}

TEST(CompareRuns, ANumberIsNotEqualToNan) {
  const RunComparison comparison = compare_runs(table("loss\n0,0,1\n0,1,9\n"), table("loss\n0,0,nan\n0,1,2\n"));
  ASSERT_EQ(comparison.different.size(), 1u);
  EXPECT_EQ(comparison.different[0].earliest.step, 0);
  EXPECT_EQ(comparison.different[0].largest->step, 0);
}

TEST(CompareRuns, RowsOfTheSameStepCorrespondInTheirOrder) {
  const MetricTable run = table("loss\n0,5,1\n1,5,2\n");
  EXPECT_TRUE(compare_runs(run, run).are_equal());
  EXPECT_EQ(compare_runs(run, table("loss\n0,5,1\n1,5,3\n")).different.at(0).num_different, 1);
}

TEST(CompareRuns, MetricsOfOneRunAloneAreNamed) {
  const RunComparison comparison = compare_runs(table("x,empty\n0,0,1,\n"), table("y,empty\n0,0,1,\n"));
  EXPECT_FALSE(comparison.are_equal());
  EXPECT_THAT(comparison.only_in_first, ElementsAre("x"));
  EXPECT_THAT(comparison.only_in_second, ElementsAre("y"));
  EXPECT_EQ(to_text(comparison, "a", "b"), "a and b have no metric in common\nonly in a: x\nonly in b: y\n");
}

TEST(CompareRuns, NamesDoNotReachTheTerminalAsControlCharacters) {
  const RunComparison comparison = compare_runs(table("\"a\x1b[2J\nb\",\"only\nhere\",损\n0,0,1,2,3\n"),
                                                table("\"a\x1b[2J\nb\",损,\xc2\x9b,train/mfu\x1b\n0,0,2,3,4,5\n"));
  const std::string text = to_text(comparison, "first\x1b", "second\n");
  EXPECT_EQ(text,
            "first? and second? differ from step 0 on: a?[2J?b is 1 and 2, a difference of 1\n"
            "\n"
            "metric   first at step  different  missing  largest difference\n"
            "a?[2J?b              0          1        0  at step 0: 1 and 2, a difference of 1\n"
            "only in first?: only?here\n"
            "only in second?: train/mfu?, ?\n");
}

TEST(CompareRuns, WhatMeasuresTheMachineIsComparedOnRequest) {
  const MetricTable a = table("loss,train/samples_per_sec\n0,0,1,100\n"),
                    b = table("loss,train/samples_per_sec\n0,0,1,90\n");
  EXPECT_TRUE(compare_runs(a, b).are_equal());
  EXPECT_THAT(compare_runs(a, b).ignored, ElementsAre("train/samples_per_sec"));
  EXPECT_FALSE(compare_runs(a, b, {.compares_machine = true}).are_equal());
  const MetricTable only = table("train/samples_per_sec\n0,0,100\n");
  EXPECT_FALSE(compare_runs(only, only).are_equal());  // nothing was compared
}

}  // namespace
}  // namespace fulgur
