#include "fulgur/optim/lr_schedulers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/state_json.h"
#include "tests/testing/errors.h"

namespace fulgur::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

// The values of Python torch, which tools/golden/lr_schedulers.py writes.
const nlohmann::json& golden() {
  static const nlohmann::json file = [] {
    std::ifstream stream("tests/optim/lr_schedulers_golden.json");
    return nlohmann::json::parse(stream);
  }();
  return file;
}

using Maker = std::function<std::shared_ptr<LRScheduler>()>;

template <class Scheduler>
Maker of(typename Scheduler::Options options = {}) {
  return [options] { return Scheduler::make(options); };
}

// The schedulers of the golden cases, by the names that the script gives them.
const std::map<std::string, Maker>& makers() {
  static const std::map<std::string, Maker> all{
      {"StepLR", of<StepLR>({.step_size = 30})},
      {"StepLR_gamma", of<StepLR>({.step_size = 7, .gamma = 0.9})},
      {"MultiStepLR", of<MultiStepLR>({.milestones = {30, 80}})},
      {"MultiStepLR_unsorted_twice", of<MultiStepLR>({.milestones = {150, 20, 20, 90}, .gamma = 0.5})},
      {"ExponentialLR", of<ExponentialLR>({.gamma = 0.95})},
      {"ExponentialLR_growing", of<ExponentialLR>({.gamma = 1.02})},
      {"ConstantLR", of<ConstantLR>()},
      {"ConstantLR_long", of<ConstantLR>({.factor = 0.25, .total_iters = 100})},
      {"LinearLR", of<LinearLR>()},
      {"LinearLR_down", of<LinearLR>({.start_factor = 1.0, .end_factor = 0.01, .total_iters = 150})},
      {"PolynomialLR", of<PolynomialLR>()},
      {"PolynomialLR_power", of<PolynomialLR>({.total_iters = 180, .power = 2.5})},
      {"CosineAnnealingLR", of<CosineAnnealingLR>({.T_max = 200})},
      {"CosineAnnealingLR_rising_again", of<CosineAnnealingLR>({.T_max = 40})},
      {"CosineAnnealingLR_eta_min", of<CosineAnnealingLR>({.T_max = 45, .eta_min = 1e-3})},
      {"CosineAnnealingWarmRestarts", of<CosineAnnealingWarmRestarts>({.T_0 = 30})},
      {"CosineAnnealingWarmRestarts_T_mult",
       of<CosineAnnealingWarmRestarts>({.T_0 = 10, .T_mult = 2, .eta_min = 1e-3})},
      {"CosineAnnealingWarmRestarts_T_mult_3", of<CosineAnnealingWarmRestarts>({.T_0 = 7, .T_mult = 3})},
      {"OneCycleLR", of<OneCycleLR>({.max_lr = 0.5, .total_steps = 200})},
      {"OneCycleLR_group_peaks", of<OneCycleLR>({.total_steps = 200})},
      {"OneCycleLR_linear", of<OneCycleLR>({.max_lr = 0.5,
                                            .total_steps = 150,
                                            .pct_start = 0.11,
                                            .anneal_strategy = "linear",
                                            .div_factor = 10.0,
                                            .final_div_factor = 100.0})},
      {"OneCycleLR_three_phase",
       of<OneCycleLR>({.max_lr = 0.5, .total_steps = 200, .pct_start = 0.41, .three_phase = true})},
      {"LambdaLR",
       of<LambdaLR>({.lr_lambda = [](int64_t step) { return 1 / std::sqrt(1 + static_cast<double>(step)); }})},
      {"WarmupCosineLR", of<WarmupCosineLR>({.warmup_steps = 20, .total_steps = 200})},
      {"WarmupCosineLR_min_lr_ratio", of<WarmupCosineLR>({.total_steps = 150, .min_lr_ratio = 0.1})},
      {"WarmupLinearLR", of<WarmupLinearLR>({.warmup_steps = 20, .total_steps = 180})},
      {"ReduceLROnPlateau", of<ReduceLROnPlateau>()},
      {"ReduceLROnPlateau_max", of<ReduceLROnPlateau>({.mode = "max",
                                                       .factor = 0.5,
                                                       .patience = 3,
                                                       .threshold = 0.01,
                                                       .threshold_mode = "abs",
                                                       .cooldown = 5,
                                                       .min_lr = 2e-4})},
      {"ReduceLROnPlateau_max_rel",
       of<ReduceLROnPlateau>({.mode = "max", .factor = 0.7, .patience = 2, .threshold = 0.1, .eps = 1e-3})},
      {"ChainedScheduler", of<ChainedScheduler>({.schedulers = {ConstantLR::make({.factor = 0.1, .total_iters = 20}),
                                                                ExponentialLR::make({.gamma = 0.97})}})},
      {"ChainedScheduler_of_three",
       of<ChainedScheduler>(
           {.schedulers = {LinearLR::make({.start_factor = 0.05, .total_iters = 40}),
                           StepLR::make({.step_size = 50, .gamma = 0.5}), CosineAnnealingLR::make({.T_max = 250})}})},
      {"SequentialLR", of<SequentialLR>({.schedulers = {LinearLR::make({.start_factor = 0.01, .total_iters = 25}),
                                                        CosineAnnealingLR::make({.T_max = 175, .eta_min = 1e-4})},
                                         .milestones = {25}})},
      {"SequentialLR_of_three", of<SequentialLR>({.schedulers = {ConstantLR::make({.factor = 0.1, .total_iters = 20}),
                                                                 ExponentialLR::make({.gamma = 0.98}),
                                                                 CosineAnnealingWarmRestarts::make({.T_0 = 30})},
                                                  .milestones = {20, 90}})},
  };
  return all;
}

// The metrics of a plateau case; the other cases have the same number of zeros, which a pure schedule ignores.
std::vector<double> metrics_of(const nlohmann::json& golden_case) {
  auto metrics = golden_case["metrics"].get<std::vector<double>>();
  metrics.resize(golden_case["lrs"][0].size() - 1);
  return metrics;
}

TEST(LRSchedulers, EveryGoldenCaseIsCompared) {
  EXPECT_EQ(golden().size(), makers().size() + 1);  // one entry says what made the file
  for (const auto& [name, maker] : makers()) EXPECT_TRUE(golden().contains(name)) << name;
}

class EveryScheduler : public ::testing::TestWithParam<std::string> {
 protected:
  const nlohmann::json& golden_case() const { return golden().at(GetParam()); }
  std::shared_ptr<LRScheduler> make() const { return makers().at(GetParam())(); }
};

TEST_P(EveryScheduler, AgreesWithTorch) {
  const auto initial_lrs = golden_case()["initial_lrs"].get<std::vector<double>>();
  const auto expected = golden_case()["lrs"].get<std::vector<std::vector<double>>>();
  const std::vector<double> metrics = metrics_of(golden_case());
  const auto scheduler = make();
  for (size_t step = 0; step < expected[0].size(); ++step) {
    if (step > 0) scheduler->observe(metrics[step - 1]);
    for (size_t i = 0; i < initial_lrs.size(); ++i) {
      EXPECT_NEAR(scheduler->lr(initial_lrs[i], static_cast<int64_t>(step)), expected[i][step],
                  1e-7 * expected[i][step])
          << "group " << i << ", step " << step;
    }
  }
}

TEST_P(EveryScheduler, MayBeAskedInAnyOrder) {
  const auto scheduler = make();
  for (const double metric : metrics_of(golden_case())) scheduler->observe(metric);
  std::vector<double> forward;
  for (int64_t step = 0; step < 300; ++step) forward.push_back(scheduler->lr(0.1, step));
  for (int64_t i = 0; i < 300; ++i) {
    const int64_t step = i * 7 % 300;
    EXPECT_EQ(scheduler->lr(0.1, step), forward[static_cast<size_t>(step)]) << step;
  }
}

TEST_P(EveryScheduler, GoesOnFromItsState) {
  const std::vector<double> metrics = metrics_of(golden_case());
  for (size_t stop = 0; stop <= metrics.size(); ++stop) {
    const auto uninterrupted = make(), resumed = make();
    for (size_t i = 0; i < stop; ++i) uninterrupted->observe(metrics[i]);
    resumed->load_state(uninterrupted->state());
    for (size_t i = stop; i < metrics.size(); ++i) {
      const auto step = static_cast<int64_t>(i);
      ASSERT_EQ(resumed->lr(0.1, step), uninterrupted->lr(0.1, step)) << "stopped at " << stop << ", step " << step;
      uninterrupted->observe(metrics[i]);
      resumed->observe(metrics[i]);
    }
    NamedTensors none;
    EXPECT_EQ(state_to_json(resumed->state(), none), state_to_json(uninterrupted->state(), none));
  }
}

TEST_P(EveryScheduler, IsNamedAsInTorch) { EXPECT_EQ(GetParam().substr(0, GetParam().find('_')), make()->name()); }

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const auto& [name, maker] : makers()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(, EveryScheduler, ::testing::ValuesIn(case_names()),
                         [](const auto& name) { return name.param; });

TEST(LRSchedulers, StayAtTheEndOfTheSchedule) {
  constexpr int64_t kFar = 1'000'000;
  EXPECT_DOUBLE_EQ(OneCycleLR::make({.total_steps = 50})->lr(1.0, 50), 1.0 / 25 / 1e4);
  EXPECT_DOUBLE_EQ(OneCycleLR::make({.total_steps = 50})->lr(1.0, kFar), 1.0 / 25 / 1e4);
  EXPECT_DOUBLE_EQ(WarmupCosineLR::make({.total_steps = 50, .min_lr_ratio = 0.1})->lr(1.0, kFar), 0.1);
  EXPECT_DOUBLE_EQ(WarmupLinearLR::make({.total_steps = 50, .min_lr_ratio = 0.1})->lr(1.0, kFar), 0.1);
  EXPECT_EQ(PolynomialLR::make()->lr(1.0, kFar), 0.0);
  EXPECT_EQ(LinearLR::make()->lr(1.0, kFar), 1.0);
}

TEST(LRSchedulers, PhasesOfNoLengthAreSkipped) {
  EXPECT_EQ(LinearLR::make({.total_iters = 0})->lr(1.0, 0), 1.0);
  EXPECT_EQ(LinearLR::make({.start_factor = 0.0})->lr(1.0, 0), 0.0);
  EXPECT_EQ(ConstantLR::make({.total_iters = 0})->lr(1.0, 0), 1.0);
  EXPECT_EQ(WarmupLinearLR::make({.warmup_steps = 0, .total_steps = 10})->lr(1.0, 0), 1.0);
  EXPECT_EQ(WarmupCosineLR::make({.warmup_steps = 10, .total_steps = 10, .min_lr_ratio = 0.5})->lr(1.0, 10), 0.5);
  const auto no_warmup =
      SequentialLR::make({.schedulers = {ConstantLR::make(), ExponentialLR::make({.gamma = 0.5})}, .milestones = {0}});
  EXPECT_EQ(no_warmup->lr(1.0, 0), 1.0);
  EXPECT_EQ(no_warmup->lr(1.0, 1), 0.5);
}

TEST(OneCycleLR, AnyFractionRisesAndFallsBetweenItsBounds) {
  for (const bool three_phase : {false, true}) {
    for (const int64_t total_steps : {1, 2, 3, 10}) {
      for (const double pct_start : {0.0, 0.1, 0.3, 0.5, 1.0}) {
        if (three_phase && pct_start > 0.5) continue;
        const auto scheduler =
            OneCycleLR::make({.total_steps = total_steps, .pct_start = pct_start, .three_phase = three_phase});
        for (int64_t step = 0; step < total_steps + 2; ++step) {
          EXPECT_THAT(scheduler->lr(1.0, step), AllOf(::testing::Ge(0.999 / 25 / 1e4), ::testing::Le(1.001)))
              << three_phase << ' ' << total_steps << ' ' << pct_start << ' ' << step;
        }
      }
    }
  }
}

TEST(ReduceLROnPlateau, ANaNIsNotBetter) {
  const auto scheduler = ReduceLROnPlateau::make({.factor = 0.5, .patience = 1});
  scheduler->observe(1.0);
  EXPECT_EQ(scheduler->lr(1.0, 0), 1.0);
  for (int i = 0; i < 2; ++i) scheduler->observe(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(scheduler->lr(1.0, 0), 0.5);
}

TEST(ReduceLROnPlateau, RefusesTheStateOfAnother) {
  EXPECT_THAT(
      message_of<CheckpointError>([] { ReduceLROnPlateau::make()->load_state(StepLR({.step_size = 1}).state()); }),
      AllOf(HasSubstr("not a state of ReduceLROnPlateau"), HasSubstr("best")));
}

TEST(ChainedScheduler, TakesAPlateauAfterAWarmup) {
  const auto make = [] {
    return ChainedScheduler::make({.schedulers = {LinearLR::make({.start_factor = 0.5, .total_iters = 2}),
                                                  ReduceLROnPlateau::make({.factor = 0.1, .patience = 0})}});
  };
  const auto scheduler = make();
  EXPECT_TRUE(scheduler->needs_metric());
  EXPECT_DOUBLE_EQ(scheduler->lr(1.0, 0), 0.5);
  scheduler->observe(1.0);
  EXPECT_DOUBLE_EQ(scheduler->lr(1.0, 1), 0.75);
  scheduler->observe(2.0);
  EXPECT_DOUBLE_EQ(scheduler->lr(1.0, 2), 0.1);

  const auto resumed = make();
  resumed->load_state(scheduler->state());
  EXPECT_DOUBLE_EQ(resumed->lr(1.0, 2), 0.1);
  EXPECT_FALSE(ChainedScheduler::make({.schedulers = {LinearLR::make()}})->needs_metric());
}

TEST(ChainedScheduler, RefusesTheStateOfAnother) {
  const auto of_one = ChainedScheduler::make({.schedulers = {LinearLR::make()}});
  const auto of_two = ChainedScheduler::make({.schedulers = {LinearLR::make(), LinearLR::make()}});
  EXPECT_THAT(message_of<CheckpointError>([&] { of_one->load_state(of_two->state()); }),
              HasSubstr("not a state of ChainedScheduler with 1 scheduler"));
}

template <class Scheduler>
std::string refusal(typename Scheduler::Options options) {
  return message_of<UsageError>([&] { Scheduler::make(options); });
}

TEST(LRSchedulers, SayWhatMustBeGiven) {
  EXPECT_EQ(refusal<StepLR>({}), "StepLR: step_size must be at least 1; got 0");
  EXPECT_THAT(refusal<MultiStepLR>({}), HasSubstr("write {.milestones = {30, 60}}"));
  EXPECT_THAT(refusal<ExponentialLR>({}), HasSubstr("gamma must be above 0; got 0"));
  EXPECT_THAT(refusal<CosineAnnealingLR>({}), HasSubstr("T_max must be at least 1"));
  EXPECT_THAT(refusal<CosineAnnealingWarmRestarts>({}), HasSubstr("T_0 must be at least 1"));
  EXPECT_THAT(refusal<OneCycleLR>({}), HasSubstr("total_steps must be at least 1"));
  EXPECT_THAT(refusal<LambdaLR>({}), HasSubstr("write {.lr_lambda = [](int64_t step) { ... }}"));
  EXPECT_THAT(refusal<WarmupCosineLR>({}), HasSubstr("WarmupCosineLR: total_steps must be at least 1"));
  EXPECT_THAT(refusal<WarmupLinearLR>({}), HasSubstr("WarmupLinearLR: total_steps must be at least 1"));
  EXPECT_THAT(refusal<ChainedScheduler>({}), HasSubstr("ChainedScheduler: schedulers is empty"));
  EXPECT_THAT(refusal<SequentialLR>({}), HasSubstr("SequentialLR: schedulers is empty"));
}

TEST(LRSchedulers, RefuseOptionsOutOfRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(refusal<StepLR>({.step_size = 1, .gamma = -1}), HasSubstr("gamma must be at least 0"));
  EXPECT_THAT(refusal<MultiStepLR>({.milestones = {5, -2}}), HasSubstr("milestones must be at least 0; got -2"));
  EXPECT_THAT(refusal<MultiStepLR>({.milestones = {5}, .gamma = -1}), HasSubstr("gamma must be at least 0"));
  EXPECT_THAT(refusal<ExponentialLR>({.gamma = nan}), HasSubstr("gamma must be at least 0; got nan"));
  EXPECT_THAT(refusal<ExponentialLR>({}), HasSubstr("gamma must be above 0; got 0"));
  EXPECT_THAT(refusal<ConstantLR>({.factor = 2}), HasSubstr("factor must be at most 1; got 2"));
  EXPECT_THAT(refusal<LinearLR>({.start_factor = 2}), HasSubstr("start_factor must be at most 1"));
  EXPECT_THAT(refusal<LinearLR>({.end_factor = -1}), HasSubstr("end_factor must be at least 0"));
  EXPECT_THAT(refusal<PolynomialLR>({.total_iters = 0}), HasSubstr("total_iters must be at least 1"));
  EXPECT_THAT(refusal<CosineAnnealingWarmRestarts>({.T_0 = 1, .T_mult = 0}), HasSubstr("T_mult must be at least 1"));
  EXPECT_THAT(refusal<OneCycleLR>({.total_steps = 9, .anneal_strategy = "line"}), HasSubstr("did you mean 'linear'?"));
  EXPECT_THAT(refusal<OneCycleLR>({.total_steps = 9, .pct_start = 0.6, .three_phase = true}),
              HasSubstr("pct_start must be at most 0.5 with three_phase; got 0.6"));
  EXPECT_THAT(refusal<OneCycleLR>({.total_steps = 9, .div_factor = 0}), HasSubstr("must be above 0; got 0 and 10000"));
  EXPECT_THAT(refusal<WarmupCosineLR>({.warmup_steps = 10, .total_steps = 5}),
              HasSubstr("WarmupCosineLR: warmup_steps (10) must be at most total_steps (5)"));
  EXPECT_THAT(refusal<ReduceLROnPlateau>({.mode = "mni"}), HasSubstr("unknown mode 'mni'; did you mean 'min'?"));
  EXPECT_THAT(refusal<ReduceLROnPlateau>({.factor = 1}), HasSubstr("factor must be below 1; got 1"));
  EXPECT_THAT(refusal<ReduceLROnPlateau>({.patience = -1}), HasSubstr("patience must be at least 0"));
  EXPECT_THAT(refusal<ReduceLROnPlateau>({.threshold_mode = "relative"}), HasSubstr("unknown threshold_mode"));
}

TEST(LRSchedulers, RefuseListsThatDoNotFit) {
  const auto linear = LinearLR::make();
  EXPECT_THAT(refusal<ChainedScheduler>({.schedulers = {linear, nullptr}}), HasSubstr("a scheduler is null"));
  EXPECT_THAT(refusal<SequentialLR>({.schedulers = {linear, linear}}),
              HasSubstr("2 schedulers need 1 in milestones, the step at which each but the first begins; got 0"));
  EXPECT_THAT(refusal<SequentialLR>({.schedulers = {linear, linear, linear}, .milestones = {5, 3}}),
              HasSubstr("got [5,3]"));
  EXPECT_THAT(refusal<SequentialLR>({.schedulers = {linear, ReduceLROnPlateau::make()}, .milestones = {5}}),
              HasSubstr("ReduceLROnPlateau needs a metric; put it in a ChainedScheduler"));
}

std::string config_refusal(const LRSchedulerConfig& config) {
  return message_of<UsageError>([&] { check_scheduler_config(config); });
}

TEST(LRSchedulerConfig, IsChecked) {
  const auto linear = LinearLR::make();
  EXPECT_THAT(config_refusal({}), HasSubstr("scheduler is null"));
  EXPECT_THAT(config_refusal({.scheduler = linear, .interval = "steps"}),
              AllOf(HasSubstr("LinearLR"), HasSubstr("did you mean 'step'?")));
  EXPECT_THAT(config_refusal({.scheduler = linear, .frequency = 0}), HasSubstr("frequency must be at least 1; got 0"));
  EXPECT_THAT(config_refusal({.scheduler = ReduceLROnPlateau::make()}),
              HasSubstr("write {.scheduler = ..., .monitor = \"val_loss\"}"));
  EXPECT_NO_THROW(check_scheduler_config({.scheduler = linear, .monitor = "val_loss"}));
  EXPECT_NO_THROW(check_scheduler_config({.scheduler = ReduceLROnPlateau::make(), .monitor = "val_loss"}));
}

}  // namespace
}  // namespace fulgur::optim
