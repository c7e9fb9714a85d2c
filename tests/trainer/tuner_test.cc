#include "fulgur/trainer/tuner.h"

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/module_state.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

std::vector<at::Tensor> copy_of(const Module& module) {
  std::vector<at::Tensor> copies;
  for (const auto& [name, tensor] : named_state(module)) copies.push_back(tensor.detach().clone());
  return copies;
}

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

TEST(FindLearningRate, TriesRatesAndLeavesEverythingAsItWas) {
  struct WithSchedule : TinyModule {
    std::vector<double> lrs;
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = 5.0}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
    void on_before_optimizer_step(Optimizer& optimizer) override { lrs.push_back(optimizer.groups()[0].lr); }
  };
  const auto module = make_module<WithSchedule>();
  const auto before = copy_of(*module);
  Trainer trainer(quiet({.max_epochs = 3}));
  torch::manual_seed(1);
  const at::Tensor expected_draw = torch::rand({4});
  torch::manual_seed(1);
  const LearningRateCurve curve = trainer.find_learning_rate(
      module, {.train = tiny_loader()}, {.min_lr = 1e-4, .max_lr = 1.0, .num_steps = 5, .early_stop_threshold = 1e9});
  EXPECT_TRUE(torch::rand({4}).equal(expected_draw));
  expect_same(copy_of(*module), before);
  const std::vector<double> expected{1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  ASSERT_EQ(curve.lrs.size(), 5U);
  for (size_t i = 0; i < 5; ++i) EXPECT_NEAR(curve.lrs[i], expected[i], 1e-12);
  EXPECT_EQ(module->lrs, curve.lrs);
  EXPECT_EQ(trainer.state().global_step, 0);

  double average = 0.0;  // running average of the module's losses
  for (size_t i = 0; i < 5; ++i) {
    average = 0.98 * average + 0.02 * module->train_losses[i];
    EXPECT_NEAR(curve.losses[i], average / (1.0 - std::pow(0.98, i + 1)), 1e-9);
  }
}

TEST(FindLearningRate, SpacesTheRatesLinearlyIfAsked) {
  const LearningRateCurve curve = Trainer(quiet()).find_learning_rate(
      make_module<TinyModule>(), {.train = tiny_loader()},
      {.min_lr = 1e-3, .max_lr = 5e-3, .num_steps = 5, .mode = "linear", .early_stop_threshold = 1e9});
  const std::vector<double> expected{1e-3, 2e-3, 3e-3, 4e-3, 5e-3};
  EXPECT_THAT(curve.lrs, ::testing::Pointwise(::testing::DoubleNear(1e-12), expected));
}

TEST(FindLearningRate, ALossBelowZeroDoesNotCountAsDivergence) {
  struct Negative : TinyModule {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      return TinyModule::training_step(batch, batch_idx) - 1000.0;
    }
  };
  Trainer trainer(quiet({}));
  const auto curve = trainer.find_learning_rate(make_module<Negative>(), {.train = tiny_loader()}, {.num_steps = 5});
  EXPECT_EQ(curve.lrs.size(), 5U);
}

// Weights that a 16-bit type cannot represent, and a gradient that the program has computed.
TEST(Tuner, LeavesWeightsAndGradientsInEveryPrecisionAndOnTheHost) {
  for (const char* strategy : {"single_device", "zero_offload"}) {
    for (const char* precision : {"32", "64", "bf16-true", "16-true"}) {
      SCOPED_TRACE(c10::str(strategy, " ", precision));
      const auto module = make_module<TinyModule>();
      const auto before = copy_of(*module);
      module->out->bias.mutable_grad() = torch::full({1}, 0.1);
      const auto expect_unchanged = [&] {
        expect_same(copy_of(*module), before);
        for (const at::Tensor& parameter : module->parameters()) {
          EXPECT_EQ(parameter.grad().defined(), parameter.is_same(module->out->bias));
        }
        EXPECT_TRUE(module->out->bias.grad().equal(torch::full({1}, 0.1)));
      };
      Trainer trainer(quiet({.strategy = strategy, .precision = precision}));
      const auto curve = trainer.find_learning_rate(module, {.train = tiny_loader()}, {.num_steps = 5});
      EXPECT_EQ(curve.lrs.size(), 5U);
      expect_unchanged();
      const auto loaders_of = [](int64_t size) { return Loaders{.train = tiny_loader(40, size)}; };
      EXPECT_EQ(trainer.find_batch_size(module, loaders_of, {.max_size = 8}), 8);
      expect_unchanged();
    }
  }
}

// What configure_model builds stays, as it was built.
TEST(Tuner, LeavesWhatConfigureModelBuilds) {
  struct Late : TinyModule {
    torch::nn::Linear late{nullptr};
    at::Tensor built;
    void configure_model() override {
      if (late) return;
      late = register_module("late", torch::nn::Linear(4, 4));
      built = late->weight.detach().clone();
    }
    at::Tensor training_step(const Batch& batch, int64_t i) override {
      return TinyModule::training_step({{"x", late->forward(batch["x"])}, {"y", batch["y"]}}, i);
    }
  };
  const auto module = make_module<Late>();
  Trainer(quiet({.precision = "bf16-true"})).find_learning_rate(module, {.train = tiny_loader()}, {.num_steps = 3});
  EXPECT_TRUE(module->late->weight.equal(module->built));
}

TEST(FindLearningRate, AccumulatedStepsHaveTheMeanLoss) {
  const auto module = make_module<TinyModule>();
  const LearningRateCurve curve =
      Trainer(quiet({.accumulate_grad_batches = 2}))
          .find_learning_rate(module, {.train = tiny_loader(32, 8)}, {.max_lr = 1e-7, .num_steps = 2});
  ASSERT_EQ(curve.losses.size(), 2U);
  EXPECT_NEAR(curve.losses[0], (module->train_losses[0] + module->train_losses[1]) / 2, 1e-7);
}

TEST(FindLearningRate, StopsWhenTheLossDiverges) {
  struct Diverging : TinyModule {
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
  };
  const LearningRateCurve curve = Trainer(quiet()).find_learning_rate(
      make_module<Diverging>(), {.train = tiny_loader(400, 8)}, {.min_lr = 1e-3, .max_lr = 1e6});
  EXPECT_LT(curve.lrs.size(), 90U);
  EXPECT_LT(curve.suggestion().value(), 10.0);
}

// No step is counted any more, because the loss scale skips them all.
TEST(FindLearningRate, StopsWhenALossThatIsNotFiniteSkipsEveryStep) {
  struct BecomesNaN : TinyModule {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      const at::Tensor loss = TinyModule::training_step(batch, batch_idx);
      return global_step() >= 5 ? loss * std::nan("") : loss;
    }
  };
  const LearningRateCurve curve =
      Trainer(quiet({.precision = "16-mixed"})).find_learning_rate(make_module<BecomesNaN>(), {.train = tiny_loader()});
  ASSERT_EQ(curve.lrs.size(), 5U);
  EXPECT_TRUE(std::isfinite(curve.losses.back()));
}

TEST(FindLearningRate, SuggestsWhereTheLossFallsFastest) {
  EXPECT_EQ((LearningRateCurve{{1, 2, 3, 4, 5, 6}, {9, 9, 8, 4, 3.5, 3.4}}.suggestion(0, 0)), 3);
  EXPECT_EQ((LearningRateCurve{{1, 2, 3, 4, 5, 6}, {9, 9, 8, 4, 3.5, 3.4}}.suggestion(3, 1)), 4);
  EXPECT_EQ((LearningRateCurve{{1, 2, 3}, {3, std::nan(""), 1}}.suggestion(0, 0)), 1);
  EXPECT_EQ((LearningRateCurve{{1, 2, 3}, {3, 2, 1}}.suggestion(1, 1)), std::nullopt);
}

TEST(FindLearningRate, RefusesWhatItCannotUse) {
  Trainer trainer(quiet());
  const auto refusal = [&](LearningRateFinderOptions options) {
    return message_of<UsageError>(
        [&] { trainer.find_learning_rate(make_module<TinyModule>(), {.train = tiny_loader()}, options); });
  };
  EXPECT_THAT(refusal({.min_lr = 0.0}), HasSubstr("0 < min_lr < max_lr must hold; got 0 and 1"));
  EXPECT_THAT(refusal({.num_steps = 1}), HasSubstr("num_steps must be at least 2; got 1"));
  EXPECT_THAT(refusal({.mode = "cubic"}), HasSubstr("known: exponential, linear"));
  const auto manual = make_module<TinyModule>();
  manual->automatic_optimization = false;
  EXPECT_THAT(message_of<SetupError>([&] { trainer.find_learning_rate(manual, {.train = tiny_loader()}); }),
              HasSubstr("optimises manually"));
}

// A data module that must not be asked for anything.
struct Untouched final : DataModule {
  void prepare_data() override { ADD_FAILURE() << "prepare_data was called"; }
};

TEST(FindLearningRate, RefusesAModuleThatCannotTrainBeforeAnythingRuns) {
  struct WithoutOptimizer : Module {
    at::Tensor training_step(const Batch&, int64_t) override { return {}; }
  };
  struct WithoutStep : Module {
    Optimizers configure_optimizers() override { return {}; }
  };
  Trainer trainer(quiet());
  Untouched data;
  EXPECT_THAT(message_of<SetupError>([&] { trainer.find_learning_rate(make_module<WithoutOptimizer>(), data); }),
              HasSubstr("has no optimizer"));
  EXPECT_THAT(message_of<SetupError>([&] { trainer.find_learning_rate(make_module<WithoutStep>(), data); }),
              HasSubstr("training_step"));
}

TEST(Tuner, IsRefusedWithinARunOfTheSameTrainer) {
  struct Nested : TinyModule {
    std::function<void()> in_first_epoch;
    void on_train_epoch_start() override { in_first_epoch(); }
  };
  Trainer trainer(quiet());
  const auto module = make_module<Nested>();
  std::vector<std::string> refusals;
  const auto other = make_module<TinyModule>();
  module->in_first_epoch = [&] {
    refusals = {message_of<UsageError>([&] { trainer.find_learning_rate(other, {.train = tiny_loader()}); }),
                message_of<UsageError>([&] { trainer.fit(other, {.train = tiny_loader()}); })};
  };
  trainer.fit(module, {.train = tiny_loader()});
  EXPECT_THAT(refusals, ::testing::Each(HasSubstr("this Trainer is running already")));
  EXPECT_EQ(refusals.size(), 2U);
  EXPECT_EQ(trainer.state().epoch, 1);
}

TEST(TrainerWithinATrainer, RunsAnotherModuleOnly) {
  struct Nested : TinyModule {
    std::function<void()> in_first_epoch;
    void on_train_epoch_start() override { in_first_epoch(); }
  };
  const auto module = make_module<Nested>();
  const auto other = make_module<TinyModule>();
  std::string refusal;
  module->in_first_epoch = [&] {
    refusal = message_of<UsageError>([&] { Trainer(quiet()).validate(module, {.val = {tiny_loader()}}); });
    Trainer(quiet()).validate(other, {.val = {tiny_loader()}});
    module->log("after", 1.0);
  };
  Trainer trainer(quiet());
  trainer.fit(module, {.train = tiny_loader()});
  EXPECT_THAT(refusal, HasSubstr("Nested is in a run already, of another Trainer"));
  EXPECT_EQ(trainer.callback_metrics().at("after"), 1.0);
}

TEST(Tuner, RefusesARunWithinATrial) {
  struct Nested : TinyModule {
    std::function<void()> in_first_epoch;
    void on_train_epoch_start() override { in_first_epoch(); }
  };
  Trainer trainer(quiet());
  const auto module = make_module<Nested>(), other = make_module<Nested>();
  std::string refusal;
  module->in_first_epoch = [&] {
    refusal = message_of<UsageError>([&] { trainer.validate(other, {.val = {tiny_loader()}}); });
  };
  EXPECT_FALSE(trainer.find_learning_rate(module, {.train = tiny_loader()}, {.num_steps = 5}).losses.empty());
  EXPECT_THAT(refusal, HasSubstr("this Trainer is running already"));
}

// A module that runs out of memory with more than `capacity` samples.
struct Limited : TinyModule {
  explicit Limited(int64_t given) : capacity(given) {}
  int64_t capacity;
  std::vector<int64_t> sizes;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (sizes.empty() || sizes.back() != batch.batch_size()) sizes.push_back(batch.batch_size());
    if (batch.batch_size() > capacity) throw std::bad_alloc();
    return TinyModule::training_step(batch, batch_idx);
  }
};

Loaders loaders_of(int64_t batch_size) { return {.train = tiny_loader(400, batch_size)}; }

TEST(FindBatchSize, DoublesUntilMemoryRunsOut) {
  const auto module = make_module<Limited>(40);
  const auto before = copy_of(*module);
  EXPECT_EQ(Trainer(quiet()).find_batch_size(module, loaders_of), 32);
  EXPECT_THAT(module->sizes, ElementsAre(2, 4, 8, 16, 32, 64));
  expect_same(copy_of(*module), before);
}

TEST(FindBatchSize, BeginsWithTheSizeAndTakesTheStepsThatAreAskedFor) {
  const auto module = make_module<Limited>(40);
  EXPECT_EQ(
      Trainer(quiet()).find_batch_size(module, loaders_of, {.init_size = 10, .max_size = 20, .steps_per_trial = 5}),
      20);
  EXPECT_THAT(module->sizes, ElementsAre(10, 20));
  EXPECT_EQ(module->train_losses.size(), 10U);
}

TEST(Tuner, DoesNothingInFastDevRun) {
  const auto module = make_module<Limited>(40);
  Trainer trainer(quiet({.fast_dev_run = 1}));
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(trainer.find_learning_rate(module, {.train = tiny_loader()}).lrs.empty());
  EXPECT_EQ(trainer.find_batch_size(module, loaders_of, {.init_size = 6}), 6);
  EXPECT_TRUE(module->sizes.empty());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("find_learning_rate does nothing in fast_dev_run"),
                    HasSubstr("find_batch_size does nothing in fast_dev_run")));
}

TEST(FindBatchSize, SearchesBetweenTheLastTwo) {
  const auto module = make_module<Limited>(40);
  EXPECT_EQ(Trainer(quiet()).find_batch_size(module, loaders_of, {.mode = "binsearch", .margin = 0.0}), 40);
  EXPECT_EQ(Trainer(quiet()).find_batch_size(module, loaders_of, {.mode = "binsearch", .margin = 0.1}), 36);
}

// A trial that runs out of memory fails like any run.
TEST(FindBatchSize, WorksWithAStrategyThatHasRanks) {
  const auto module = make_module<Limited>(40);
  Trainer trainer(quiet({.strategy = "zero_offload"}));
  EXPECT_EQ(trainer.find_batch_size(module, loaders_of, {.mode = "binsearch", .margin = 0.0}), 40);
  trainer.fit(module, loaders_of(40));
  EXPECT_EQ(trainer.state().global_step, 10);
}

TEST(FindBatchSize, EndsAtTheLargestSizeAndTheWholeEpoch) {
  const auto module = make_module<Limited>(1000);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Trainer(quiet()).find_batch_size(module, loaders_of, {.max_size = 100}), 100);
  EXPECT_EQ(Trainer(quiet()).find_batch_size(module, loaders_of), 512);  // one batch of all 400 samples
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(told,
              HasSubstr("memory was not the limit; a batch of 100 is the largest that was to be tried (max_size)"));
  EXPECT_THAT(told, HasSubstr("memory was not the limit; a batch of 512 is a whole epoch"));
}

TEST(FindBatchSize, SchedulesAreMadeForTheWholeTraining) {
  struct WithWarmup : TinyModule {
    std::vector<int64_t> num_steps;
    Optimizers configure_optimizers() override {
      num_steps.push_back(estimated_stepping_batches());
      return {
          optim::SGD(parameters(), {.lr = 0.1}),
          {.scheduler = optim::WarmupCosineLR::make({.warmup_steps = 50, .total_steps = estimated_stepping_batches()}),
           .interval = "step"}};
    }
  };
  const auto module = make_module<WithWarmup>();
  Trainer trainer(quiet({.max_epochs = 3}));
  EXPECT_EQ(trainer.find_batch_size(module, loaders_of, {.max_size = 4}), 4);
  EXPECT_FALSE(trainer.find_learning_rate(module, loaders_of(8), {.num_steps = 2}).lrs.empty());
  EXPECT_THAT(module->num_steps, ElementsAre(3 * 200, 3 * 100, 3 * 50));
}

// The Trainer makes schedules, which a module may step itself, and moves none.
TEST(Tuner, SchedulesAreThereAndStayWhereTheyAre) {
  struct StepsItsSchedule : TinyModule {
    StepsItsSchedule() { automatic_optimization = false; }
    at::Tensor training_step(const Batch& batch, int64_t) override {
      const at::Tensor value = loss(batch);
      optimizer().zero_grad();
      manual_backward(value);
      optimizer().step();
      lr_scheduler().step();
      return value;
    }
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = 0.1}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
  };
  struct ReadsItsSchedule : TinyModule {
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = 0.1}),
              {.scheduler = optim::StepLR::make({.step_size = 1}), .interval = "step"}};
    }
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
      EXPECT_EQ(lr_scheduler().num_steps(), 0);
    }
  };
  Trainer trainer(quiet());
  EXPECT_EQ(trainer.find_batch_size(make_module<StepsItsSchedule>(), loaders_of, {.max_size = 4}), 4);
  const auto curve = trainer.find_learning_rate(make_module<ReadsItsSchedule>(), loaders_of(8),
                                                {.min_lr = 1e-3, .max_lr = 1e-1, .num_steps = 3});
  ASSERT_EQ(curve.lrs.size(), 3U);
  EXPECT_NEAR(curve.lrs[1], 1e-2, 1e-9);
}

TEST(FindBatchSize, OtherErrorsAndTooLittleMemoryReachTheCaller) {
  EXPECT_THROW(Trainer(quiet()).find_batch_size(make_module<Limited>(1), loaders_of), std::bad_alloc);
  struct Failing : TinyModule {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (batch.batch_size() > 4) throw std::runtime_error("no");
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  EXPECT_THROW(Trainer(quiet()).find_batch_size(make_module<Failing>(), loaders_of), std::runtime_error);
}

}  // namespace
}  // namespace fulgur
