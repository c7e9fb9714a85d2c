#include "core/metric_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Pair;

Batch batch_of(int64_t size) { return {{"x", torch::zeros({size, 2})}}; }

class MetricLogTest : public ::testing::Test {
 protected:
  // One batch of `size` samples with `value` logged in its step.
  template <class Value>
  void step(Stage stage, int64_t size, Value value, const LogOptions& options = {}) {
    const Batch batch = batch_of(size);
    log.enter(stage, stage == Stage::train ? LogScope::training_step : LogScope::evaluation_step, &batch);
    log.log("m", value, options);
  }

  MetricLog log;
};

TEST_F(MetricLogTest, TrainingStepsKeepTheLastValueOnly) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 2, 1.0);
  step(Stage::train, 2, 5.0);
  EXPECT_THAT(log.step_metrics(), ElementsAre(Pair("m", 5.0)));
  EXPECT_THAT(log.callback_metrics(), ElementsAre(Pair("m", 5.0)));
  EXPECT_THAT(log.end_epoch(Stage::train), IsEmpty());
  EXPECT_THAT(log.callback_metrics(), ElementsAre(Pair("m", 5.0)));  // still known after the epoch
}

TEST_F(MetricLogTest, EvaluationMeansAreWeightedByBatchSize) {
  log.begin_epoch(Stage::validate);
  step(Stage::validate, 3, 1.0);
  step(Stage::validate, 1, torch::tensor(5.0));
  EXPECT_THAT(log.step_metrics(), IsEmpty());
  EXPECT_THAT(log.end_epoch(Stage::validate), ElementsAre(Pair("m", 2.0)));
}

TEST_F(MetricLogTest, ExplicitBatchSizeWins) {
  log.begin_epoch(Stage::test);
  step(Stage::test, 3, 1.0, {.batch_size = 1});
  step(Stage::test, 3, 2.0, {.batch_size = 3});
  EXPECT_THAT(log.end_epoch(Stage::test), ElementsAre(Pair("m", 1.75)));
}

TEST_F(MetricLogTest, SumMinAndMaxAreNotWeighted) {
  for (const auto& [reduction, expected] :
       {std::pair(Reduction::sum, -1.0), std::pair(Reduction::min, -4.0), std::pair(Reduction::max, 3.0)}) {
    log.begin_epoch(Stage::test);
    step(Stage::test, 9, 3.0, {.reduce_fx = reduction});
    step(Stage::test, 1, -4.0, {.reduce_fx = reduction});
    EXPECT_THAT(log.end_epoch(Stage::test), ElementsAre(Pair("m", expected)));
  }
}

TEST_F(MetricLogTest, MinAndMaxKeepANaN) {
  for (const Reduction reduction : {Reduction::min, Reduction::max}) {
    log.begin_epoch(Stage::test);
    for (const double value : {1.0, std::nan(""), 2.0}) step(Stage::test, 1, value, {.reduce_fx = reduction});
    EXPECT_TRUE(std::isnan(log.end_epoch(Stage::test).at("m")));
  }
}

TEST_F(MetricLogTest, OnStepAndOnEpochForkTheName) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, 1.0, {.on_epoch = true});
  step(Stage::train, 1, 3.0, {.on_epoch = true});
  EXPECT_THAT(log.step_metrics(), ElementsAre(Pair("m_step", 3.0)));
  EXPECT_THAT(log.callback_metrics(), ElementsAre(Pair("m", 3.0), Pair("m_step", 3.0)));
  EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m_epoch", 2.0)));
  EXPECT_THAT(log.callback_metrics(), ElementsAre(Pair("m", 2.0), Pair("m_epoch", 2.0), Pair("m_step", 3.0)));
}

TEST_F(MetricLogTest, ValidationInsideATrainingEpochDoesNotDisturbIt) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, 1.0, {.on_step = false, .on_epoch = true});
  log.begin_epoch(Stage::validate);
  step(Stage::validate, 1, 100.0);
  log.end_epoch(Stage::validate);
  step(Stage::train, 1, 3.0, {.on_step = false, .on_epoch = true});
  EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m", 2.0)));
}

TEST_F(MetricLogTest, ValuesOfTheLastEpochAreForgotten) {
  for (const double value : {8.0, 2.0}) {
    log.begin_epoch(Stage::validate);
    step(Stage::validate, 1, value);
    EXPECT_THAT(log.end_epoch(Stage::validate), ElementsAre(Pair("m", value)));
  }
}

TEST_F(MetricLogTest, ValueIsTheOneAtTheTimeOfTheCall) {
  at::Tensor value = torch::tensor(1.0F);
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, value);
  value.fill_(9.0);
  EXPECT_THAT(log.step_metrics(), ElementsAre(Pair("m", 1.0)));
}

TEST_F(MetricLogTest, ProgressBarAndLoggerTakeWhatIsMeantForThem) {
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, LogScope::training_step);
  log.log("bar", 1.0, {.prog_bar = true, .logger = false});
  log.log("file", 2.0);
  EXPECT_THAT(log.progress_bar_metrics(), ElementsAre(Pair("bar", 1.0)));
  EXPECT_THAT(log.step_metrics(), ElementsAre(Pair("file", 2.0)));
}

TEST_F(MetricLogTest, RefusesWhatIsNoNumber) {
  log.enter(Stage::train, LogScope::training_step);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", torch::zeros({2, 3})); }), HasSubstr("shape [2, 3]"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", at::Tensor()); }), HasSubstr("undefined"));
}

TEST_F(MetricLogTest, RefusesToLogWhereThereIsNoStepOrEpoch) {
  log.enter(Stage::train, LogScope::forbidden);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0); }), HasSubstr("cannot be called in this hook"));
  log.enter(Stage::train, LogScope::epoch);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0, {.on_step = true}); }),
              HasSubstr("leave on_step out"));
}

TEST_F(MetricLogTest, RefusesContradictingOptions) {
  log.enter(Stage::train, LogScope::training_step);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0, {.on_step = false}); }),
              HasSubstr("nobody would see it"));
  log.log("m", 1.0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0, {.prog_bar = true}); }),
              HasSubstr("different options"));
}

}  // namespace
}  // namespace fulgur
