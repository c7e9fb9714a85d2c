#include "fulgur/core/metric_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/metrics/aggregation.h"
#include "fulgur/metrics/classification.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Pair;

constexpr Hook kTrainingStep{"training_step", LogScope::training_step};
constexpr Hook kValidationStep{"validation_step", LogScope::evaluation_step};
constexpr Hook kEpochEnd{"on_train_epoch_end", LogScope::epoch};
constexpr Hook kSetup{"setup", LogScope::forbidden};

Batch batch_of(int64_t size) { return {{"x", torch::zeros({size, 2})}}; }

TEST(Metrics, SayWhichNameWasProbablyMeant) {
  const Metrics metrics{{"train_loss", 0.5}, {"val_acc", 0.75}};
  EXPECT_EQ(metrics.at("val_acc"), 0.75);
  EXPECT_THAT(message_of<UsageError>([&] { metrics.at("val_ac"); }),
              HasSubstr("unknown metric 'val_ac'; did you mean 'val_acc'?"));
  EXPECT_THAT(message_of<UsageError>([] { Metrics().at("loss"); }), HasSubstr("nothing was logged"));
}

class MetricLogTest : public ::testing::Test {
 protected:
  // Runs one batch of `size` samples whose step logs `value`.
  template <class Value>
  void step(Stage stage, int64_t size, Value value, const LogOptions& options = {}) {
    const Batch batch = batch_of(size);
    log.begin_step(stage);
    log.set_batch(&batch);
    log.enter(stage, stage == Stage::train ? kTrainingStep : kValidationStep);
    log.log("m", value, options);
    log.set_batch(nullptr);
  }

  MetricLog log;
};

TEST_F(MetricLogTest, TrainingStepsKeepTheLastValueOnly) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 2, 1.0);
  step(Stage::train, 2, 5.0);
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m", 5.0)));
  EXPECT_THAT(log.callback_metrics(), ElementsAre(Pair("m", 5.0)));
  EXPECT_THAT(log.end_epoch(Stage::train), IsEmpty());
  EXPECT_THAT(log.callback_metrics(), ElementsAre(Pair("m", 5.0)));  // still known after the epoch
}

TEST_F(MetricLogTest, EvaluationMeansAreWeightedByBatchSize) {
  log.begin_epoch(Stage::validate);
  step(Stage::validate, 3, 1.0);
  step(Stage::validate, 1, torch::tensor(5.0));
  EXPECT_THAT(log.take_step_metrics(), IsEmpty());
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
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m_step", 3.0)));
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
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m", 1.0)));
}

TEST_F(MetricLogTest, ProgressBarAndLoggerTakeWhatIsMeantForThem) {
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, kTrainingStep);
  log.log("bar", 1.0, {.prog_bar = true, .logger = false});
  log.log("file", 2.0);
  EXPECT_THAT(log.progress_bar_metrics(), ElementsAre(Pair("bar", 1.0)));
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("file", 2.0)));
}

TEST_F(MetricLogTest, RefusesWhatIsNoNumber) {
  log.enter(Stage::train, kTrainingStep);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", torch::zeros({2, 3})); }), HasSubstr("shape [2, 3]"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", at::Tensor()); }), HasSubstr("undefined"));
}

TEST_F(MetricLogTest, RefusesToLogWhereThereIsNoStepOrEpoch) {
  log.enter(Stage::train, kSetup);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0); }), HasSubstr("cannot be called in setup"));
  log.enter(Stage::train, kEpochEnd);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0, {.on_step = true}); }),
              HasSubstr("leave on_step out"));
}

TEST_F(MetricLogTest, RefusesContradictingOptions) {
  log.enter(Stage::train, kTrainingStep);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0, {.on_step = false}); }),
              HasSubstr("the value would go nowhere"));
  log.log("m", 1.0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0, {.prog_bar = true}); }),
              HasSubstr("different options"));
}

TEST_F(MetricLogTest, TheSameNameInTwoHooksIsTwoValues) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, 1.0, {.on_step = false, .on_epoch = true});
  log.enter(Stage::train, kEpochEnd);
  log.log("m", 5.0, {.prog_bar = true});  // other options, so there is no mean of the two: the later value is kept
  EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m", 5.0)));
}

TEST_F(MetricLogTest, TheValueOfAStepIsTheMeanOverItsMicroBatches) {
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, kTrainingStep);
  log.begin_step(Stage::train);
  log.log("m", 1.0);
  log.log("m", torch::tensor(2.0F));
  step(Stage::validate, 1, 7.0);  // in the middle of the accumulation window
  log.enter(Stage::train, kTrainingStep);
  log.log("m", 3.0);
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m", 2.0)));
  log.begin_step(Stage::train);
  EXPECT_THAT(log.take_step_metrics(), IsEmpty());  // nothing was logged in this step
}

TEST_F(MetricLogTest, SeveralLoadersHaveTheirNumberBehindTheName) {
  log.begin_epoch(Stage::validate);
  for (int64_t loader = 0; loader < 2; ++loader) {
    log.set_dataloader(loader);
    step(Stage::validate, 1, static_cast<double>(loader), {.on_step = true});
  }
  EXPECT_THAT(log.end_epoch(Stage::validate),
              ElementsAre(Pair("m_epoch/dataloader_idx_0", 0.0), Pair("m_epoch/dataloader_idx_1", 1.0)));
  EXPECT_TRUE(log.callback_metrics().contains("m/dataloader_idx_1"));
}

TEST_F(MetricLogTest, SeveralLoadersCannotShareAPlainName) {
  log.begin_epoch(Stage::validate);
  log.set_dataloader(0);
  step(Stage::validate, 1, 1.0, {.add_dataloader_idx = false});
  log.set_dataloader(1);
  EXPECT_THAT(message_of<c10::ValueError>([&] { step(Stage::validate, 1, 1.0, {.add_dataloader_idx = false}); }),
              HasSubstr("a name of its own"));
}

TEST_F(MetricLogTest, RefusesANameWithALoadersSuffix) {
  log.enter(Stage::validate, kValidationStep);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m/dataloader_idx_0", 1.0); }), HasSubstr("without it"));
}

TEST_F(MetricLogTest, RefusesAMeanWithoutABatchSize) {
  const Batch batch{{"temperature", torch::tensor(1.0)}};
  log.enter(Stage::validate, kValidationStep);
  log.set_batch(&batch);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", 1.0); }), HasSubstr("pass {.batch_size = ...}"));
}

// Rank 0 of two: rank 1 has 3 samples with a mean of 10, a minimum of -7 and a maximum of 2.
struct WithAnother : Ranks {
  int64_t rank() const override { return 0; }
  int64_t world_size() const override { return 2; }
  std::vector<std::string> all_gather(std::string_view text) override {
    return {std::string(text), other_logs.value_or(std::string(text))};
  }
  std::optional<std::string> other_logs{};  // what rank 1 logs; nullopt: the same as rank 0
  bool is_of_metric = false;                // the least rank that has a Metric is asked for, and not a least value
  bool other_has_metric = true;             // rank 1 has logged its Metric since it resumed
  void all_reduce(std::span<double> values, Reduction reduction) override {
    if (values.size() == 1 && reduction == Reduction::sum) return;  // this rank has computed the value of a Metric
    if (values.size() == 1 && reduction == Reduction::min && is_of_metric) {
      values[0] = std::min(values[0], other_has_metric ? 1.0 : 2.0);
    } else if (reduction == Reduction::sum) {
      ASSERT_EQ(values.size(), 2U);  // a mean is exchanged as two sums
      values[0] += 30.0;
      values[1] += 3.0;
    } else {
      values[0] = reduction == Reduction::min ? std::min(values[0], -7.0) : std::max(values[0], 2.0);
    }
  }
  MetricStates combine(MetricStates states) override {
    metrics::Mean other;
    other.update(torch::full({3}, 10.0));
    return combined(std::vector{states, other.states()});
  }
};

TEST_F(MetricLogTest, NotANumberHasNoSign) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, -std::numeric_limits<double>::quiet_NaN(), {.on_step = true, .on_epoch = true});
  EXPECT_FALSE(std::signbit(log.take_step_metrics().at("m_step")));
  EXPECT_FALSE(std::signbit(log.end_epoch(Stage::train, nullptr).at("m_epoch")));
}

TEST_F(MetricLogTest, EpochValuesAreReducedOverRanks) {
  WithAnother ranks;
  for (const auto& [reduction, expected] :
       {std::pair(Reduction::mean, 8.5), std::pair(Reduction::min, -7.0), std::pair(Reduction::max, 4.0)}) {
    log.begin_epoch(Stage::validate);
    step(Stage::validate, 1, 4.0, {.reduce_fx = reduction});
    EXPECT_THAT(log.end_epoch(Stage::validate, &ranks), ElementsAre(Pair("m", expected)));
  }
  log.begin_epoch(Stage::validate);
  step(Stage::validate, 1, 4.0, {.sync_dist = false});
  EXPECT_THAT(log.end_epoch(Stage::validate, &ranks), ElementsAre(Pair("m", 4.0)));
}

TEST_F(MetricLogTest, RefusesToReduceWhatNotEveryRankLogged) {
  WithAnother ranks;
  ranks.other_logs = "";
  log.begin_epoch(Stage::validate);
  step(Stage::validate, 1, 4.0, {});
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.end_epoch(Stage::validate, &ranks); }),
              HasSubstr("rank 0 logged 'm' in validation_step and rank 1 logged nothing; log the same"));
}

TEST_F(MetricLogTest, AMetricIsComputedOverAllRanksAndReset) {
  WithAnother ranks;
  ranks.is_of_metric = true;
  metrics::Mean mean;
  for (const bool sync : {true, false}) {  // rank 0 has 2 samples with a mean of 4, rank 1 has 3 with a mean of 10
    log.begin_epoch(Stage::validate);
    log.enter(Stage::validate, kValidationStep);
    mean.update(3.0);
    log.log("m", mean, {.sync_dist = sync});
    mean.update(5.0);
    log.log("m", mean, {.sync_dist = sync});
    log.log("again", mean, {.sync_dist = sync});
    EXPECT_THAT(log.end_epoch(Stage::validate, &ranks),
                ElementsAre(Pair("again", sync ? 7.6 : 4.0), Pair("m", sync ? 7.6 : 4.0)));
  }
}

TEST_F(MetricLogTest, ItsStateTakesTheSamplesOfAMetricOver) {
  metrics::Mean mean;
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, kTrainingStep);
  mean.update(3.0);
  log.log("m", mean, {});
  log.load_state(log.state());
  log.enter(Stage::train, kTrainingStep);
  mean.update(5.0);
  log.log("m", mean, {});
  EXPECT_THAT(log.end_epoch(Stage::train, nullptr), ElementsAre(Pair("m", 4.0)));
}

TEST_F(MetricLogTest, RefusesAMetricOfTwoStagesOrLoaders) {
  metrics::Mean mean;
  log.begin_epoch(Stage::train);
  log.begin_epoch(Stage::validate);
  log.enter(Stage::train, kTrainingStep);
  log.log("train_m", mean);
  log.enter(Stage::validate, kValidationStep);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("val_m", mean); }),
              HasSubstr("this metric is logged as 'train_m' in training_step as well, for another stage"));
  metrics::Mean of_loaders;
  log.set_dataloader(0);
  log.log("m", of_loaders);
  log.log("again", of_loaders);
  log.set_dataloader(1);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", of_loaders); }),
              HasSubstr("'m/dataloader_idx_0' in validation_step as well, for another loader"));
}

TEST_F(MetricLogTest, SamplesOfAMetricWithTwoNamesAreTakenOverOnce) {
  metrics::Sum sum;
  const auto take = [&](double value) {
    log.enter(Stage::train, kTrainingStep);
    sum.update(value);
    log.log("a", sum);
    log.log("b", sum);
  };
  log.begin_epoch(Stage::train);
  take(3.0);
  log.load_state(log.state());
  take(5.0);
  EXPECT_THAT(log.end_epoch(Stage::train, nullptr), ElementsAre(Pair("a", 8.0), Pair("b", 8.0)));
}

// Rank 0 of two has a sample of 4, rank 1 three of 10.
TEST_F(MetricLogTest, AfterTheLastBatchItsStateHasTheValuesOfMetrics) {
  WithAnother ranks;
  ranks.is_of_metric = true;
  metrics::Mean mean;
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, kTrainingStep);
  mean.update(4.0);
  log.log("m", mean, {.prog_bar = true});
  MetricLog unfinished, resumed, resumed_again;
  unfinished.load_state(log.state());
  resumed.load_state(log.state_after_last_batch(ranks));
  ranks.other_has_metric = false;
  EXPECT_THAT(unfinished.end_epoch(Stage::train, &ranks), IsEmpty());  // there is no metric to compute
  resumed_again.load_state(resumed.state_after_last_batch(ranks));
  for (MetricLog* each : {&resumed, &resumed_again}) {
    EXPECT_THAT(each->end_epoch(Stage::train, &ranks), ElementsAre(Pair("m", 8.5)));
    EXPECT_THAT(each->progress_bar_metrics(), ElementsAre(Pair("m", 8.5)));
  }
  ranks.other_has_metric = true;
  EXPECT_THAT(log.end_epoch(Stage::train, &ranks), ElementsAre(Pair("m", 8.5)));
}

TEST_F(MetricLogTest, AMetricThatIsLoggedAfterAllHasItsOwnValue) {
  WithAnother ranks;
  ranks.is_of_metric = true;
  metrics::Mean mean, of_the_rest;
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, kTrainingStep);
  mean.update(4.0);
  log.log("m", mean);
  MetricLog resumed;
  resumed.load_state(log.state_after_last_batch(ranks));
  resumed.enter(Stage::train, kTrainingStep);
  of_the_rest.update(0.0);
  resumed.log("m", of_the_rest);
  EXPECT_THAT(resumed.end_epoch(Stage::train, &ranks), ElementsAre(Pair("m", 6.8)));
}

// What a validation that is cut short brings back is not the training epoch around it.
TEST_F(MetricLogTest, TheStateOfEndedEpochsLeavesTheRunningOneAlone) {
  metrics::Mean mean;
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, 1.0, {.on_step = false, .on_epoch = true});
  log.log("mean", mean);
  mean.update(2.0);
  const State ended = log.state_of_ended_epochs();
  log.begin_epoch(Stage::validate);
  step(Stage::validate, 1, 9.0);
  log.end_epoch(Stage::validate);
  log.load_state(ended);
  EXPECT_THAT(log.callback_metrics(), IsEmpty());
  step(Stage::train, 1, 3.0, {.on_step = false, .on_epoch = true});
  mean.update(6.0);
  EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m", 2.0), Pair("mean", 4.0)));
}

// The program may have changed between a checkpoint within an epoch and the run that resumes from it.
TEST_F(MetricLogTest, AfterAResumeTheOptionsOfTheNextCallHold) {
  const LogOptions before{.on_step = true, .on_epoch = true};
  const auto resumed_with = [&](const LogOptions& options) {
    log = {};
    log.begin_epoch(Stage::train);
    step(Stage::train, 1, 1.0, before);
    const State saved = log.state();
    log = {};
    log.load_state(saved);
    step(Stage::train, 1, 3.0, options);
    return log.end_epoch(Stage::train);
  };
  EXPECT_THAT(resumed_with(before), ElementsAre(Pair("m_epoch", 2.0)));
  EXPECT_THAT(resumed_with({.prog_bar = true, .on_step = true, .on_epoch = true}), ElementsAre(Pair("m_epoch", 2.0)));
  EXPECT_THAT(log.progress_bar_metrics(), ElementsAre(Pair("m_epoch", 2.0), Pair("m_step", 3.0)));
  EXPECT_THAT(resumed_with({.on_step = false, .on_epoch = true}), ElementsAre(Pair("m", 2.0)));
  EXPECT_FALSE(log.callback_metrics().contains("m_step"));
  EXPECT_THAT(resumed_with({.on_step = true, .on_epoch = true, .reduce_fx = Reduction::max}),
              ElementsAre(Pair("m_epoch", 3.0)));
  EXPECT_THAT(resumed_with({.on_step = true}), IsEmpty());
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                log.begin_epoch(Stage::train);
                step(Stage::train, 1, 1.0, before);
                step(Stage::train, 1, 1.0, {.on_step = true});
              }),
              HasSubstr("different options"));
}

TEST_F(MetricLogTest, AfterAResumeANameMayChangeBetweenANumberAndAMetric) {
  metrics::Mean mean;
  for (const bool was_metric : {false, true}) {
    log.begin_epoch(Stage::train);
    mean.reset();
    mean.update(2.0);
    const LogOptions of_epoch{.on_step = false, .on_epoch = true};
    const auto log_it = [&](bool as_metric) {
      log.enter(Stage::train, kTrainingStep);
      if (as_metric) {
        log.log("m", mean, of_epoch);
      } else {
        log.log("m", 5.0, of_epoch);
      }
    };
    log_it(was_metric);
    const State saved = log.state();
    log.load_state(saved);  // resets the metric
    mean.update(4.0);
    log_it(!was_metric);
    EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m", was_metric ? 5.0 : 3.0)));
  }
}

// A batch of 8 samples in parts of 5 and 3, and the values that each part logs.
class PartsOfABatch : public MetricLogTest {
 protected:
  void both(const LogOptions& options, double first, double second) {
    log.enter(Stage::train, kTrainingStep);
    MetricLog a, b;
    a.begin_part(log, five_);
    b.begin_part(log, three_);
    a.log("m", first, options);
    b.log("m", torch::tensor(second), options);
    log.add_parts(std::vector<const MetricLog*>{&a, &b});
  }

 private:
  Batch five_ = batch_of(5), three_ = batch_of(3);
};

TEST_F(PartsOfABatch, AreReducedAsTheWholeBatch) {
  for (const auto& [reduction, expected] : {std::pair(Reduction::mean, 2.75), std::pair(Reduction::sum, 6.0),
                                            std::pair(Reduction::min, 2.0), std::pair(Reduction::max, 4.0)}) {
    log.begin_epoch(Stage::train);
    both({.on_epoch = true, .reduce_fx = reduction}, 2.0, 4.0);
    EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m_step", expected)));
    EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m_epoch", expected)));
  }
}

TEST_F(PartsOfABatch, MicroBatchesOfAStepCountAlike) {
  log.begin_epoch(Stage::train);
  both({}, 1.0, 1.0);
  both({}, 2.0, 4.0);
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m", 1.875)));
}

TEST_F(PartsOfABatch, MayHaveWeightsOfTheirOwn) {
  log.begin_epoch(Stage::train);
  both({.on_epoch = true, .batch_size = 1}, 2.0, 4.0);
  EXPECT_THAT(log.take_step_metrics(), ElementsAre(Pair("m_step", 3.0)));
  EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m_epoch", 3.0)));
}

TEST_F(PartsOfABatch, MustAgreeOnOptions) {
  log.begin_epoch(Stage::train);
  both({}, 1.0, 1.0);
  EXPECT_THROW(both({.prog_bar = true}, 1.0, 1.0), c10::ValueError);
}

TEST_F(PartsOfABatch, HaveMetricsOfTheirOwnWhichBecomeOneValue) {
  metrics::Mean a, b;
  a.update(1.0);
  b.update(4.0);
  const Batch part = batch_of(1);
  log.begin_epoch(Stage::train);
  log.enter(Stage::train, kTrainingStep);
  for (int step = 0; step < 2; ++step) {  // only the first replica has a part in the second step
    MetricLog first, second;
    first.begin_part(log, part);
    second.begin_part(log, part);
    first.log("m", a);
    if (step == 0) second.log("m", b);
    log.add_parts(std::vector<const MetricLog*>{&first, &second});
  }
  EXPECT_THAT(log.end_epoch(Stage::train), ElementsAre(Pair("m", 2.5)));
  EXPECT_TRUE(std::isnan(b.compute().item<double>()));
}

TEST_F(PartsOfABatch, GoOnWithTheMetricOfACheckpoint) {
  const Batch part = batch_of(1);
  const auto log_in_parts = [&](MetricLog& whole, metrics::Mean& a, metrics::Mean& b) {
    whole.enter(Stage::train, kTrainingStep);
    MetricLog first, second;
    first.begin_part(whole, part);
    second.begin_part(whole, part);
    first.log("m", a);
    second.log("m", b);
    whole.add_parts(std::vector<const MetricLog*>{&first, &second});
  };
  metrics::Mean a, b, a_resumed, b_resumed;
  a.update(1.0);
  b.update(4.0);
  log.begin_epoch(Stage::train);
  log_in_parts(log, a, b);
  MetricLog resumed;
  resumed.load_state(log.state());
  a_resumed.update(7.0);
  b_resumed.update(8.0);
  log_in_parts(resumed, a_resumed, b_resumed);
  EXPECT_THAT(resumed.end_epoch(Stage::train), ElementsAre(Pair("m", 5.0)));
}

TEST_F(MetricLogTest, RefusesAMetricOfManyValuesAndAStepOfAMetric) {
  metrics::Accuracy per_class({.num_classes = 3, .average = metrics::Average::none});
  log.begin_epoch(Stage::validate);
  log.enter(Stage::validate, kValidationStep);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.log("m", per_class, {.on_step = true}); }),
              HasSubstr("leave on_step and on_epoch out"));
  log.log("m", per_class);
  EXPECT_THAT(message_of<c10::ValueError>([&] { log.end_epoch(Stage::validate); }), HasSubstr("has shape [3]"));
}

TEST_F(MetricLogTest, LoggedMetricsAreWhatLoggersWereSent) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 1, 2.0, {.on_epoch = true});
  EXPECT_TRUE(log.logged_metrics().empty());
  log.take_step_metrics();
  EXPECT_THAT(log.logged_metrics(), ElementsAre(Pair("m_step", 2.0)));
  log.end_epoch(Stage::train);
  EXPECT_THAT(log.logged_metrics(), ElementsAre(Pair("m_epoch", 2.0), Pair("m_step", 2.0)));
}

TEST_F(MetricLogTest, OneLoadersValueMayBeLoggedInTwoHooks) {
  constexpr Hook kBatchEnd{"on_validation_batch_end", LogScope::evaluation_step};
  log.begin_epoch(Stage::validate);
  log.set_dataloader(0);
  const LogOptions own_name{.batch_size = 1, .add_dataloader_idx = false};
  log.enter(Stage::validate, kValidationStep);
  log.log("a", 1.0, own_name);
  log.enter(Stage::validate, kBatchEnd);
  log.log("a", 2.0, own_name);
  EXPECT_THAT(log.end_epoch(Stage::validate), ElementsAre(Pair("a", 2.0)));
}

// The meta device stands for an accelerator: values that a checkpoint has on the CPU move to the device, and not back.
TEST_F(MetricLogTest, AfterAResumeValuesStayOnTheirDevice) {
  State saved;
  {
    MetricLog before;
    before.begin_epoch(Stage::train);
    before.enter(Stage::train, kTrainingStep);
    before.log("m", 2.0, {.on_epoch = true, .batch_size = 2});
    saved = before.state();
    for (const char* name : {"entries/0/reduced", "entries/0/step_sum"})
      saved.set(name, torch::tensor(4.0, at::kDouble));
  }
  log.load_state(saved);
  log.enter(Stage::train, kTrainingStep);
  log.log("m", torch::empty({}, at::kMeta), {.on_epoch = true, .batch_size = 1});
  EXPECT_TRUE(log.state().get<at::Tensor>("entries/0/reduced").is_meta());
}

TEST_F(MetricLogTest, WhatACheckpointHasOfTheWrongKindIsNamed) {
  log.begin_epoch(Stage::train);
  step(Stage::train, 2, 1.0);
  const auto message = [&](const std::string& name, const State::Value& value) {
    State changed = log.state();
    changed.set(name, value);
    return message_of<CheckpointError>([&] { MetricLog().load_state(changed); });
  };
  EXPECT_THAT(message("callback_metrics/loss", std::string("low")), HasSubstr("loss"));
  EXPECT_THAT(message("entries/0/reduced", torch::zeros({2})), HasSubstr("reduced"));
}

}  // namespace
}  // namespace fulgur
