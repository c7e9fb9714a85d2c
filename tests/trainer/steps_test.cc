// How batches become optimizer steps: accumulation windows of micro-batches, skipped batches and epochs, skipped
// updates, and which steps loggers get.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/lbfgs.h>
#include <torch/types.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/callback.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/counting_module.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using testing::at_batch_end;
using testing::CountingModule;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::quiet;
using testing::stop_at_batch;
using testing::tiny_loader;

constexpr double kLr = 0.5;

// One weight w and the loss w * x: the gradient of a batch is the mean of its x, whatever w is.
struct Line : Module {
  at::Tensor w = register_parameter("w", torch::zeros({}));
  at::Tensor training_step(const Batch& batch, int64_t) override { return (w * batch["x"]).mean(); }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = kLr}); }
};

// Batches of one sample, with these x.
std::shared_ptr<Loader> loader_of(const std::vector<float>& x) {
  return DataLoader::make(TensorDataset::make({{"x", torch::tensor(x)}}), {.batch_size = 1});
}

template <class M>
double weight_after(TrainerOptions options, const std::vector<float>& x) {
  const auto module = make_module<M>();
  Trainer(quiet(std::move(options))).fit(module, {.train = loader_of(x)});
  return module->w.template item<double>();
}

TEST(Steps, AShortLastWindowIsDividedByItsRealCount) {
  EXPECT_DOUBLE_EQ(weight_after<Line>({.accumulate_grad_batches = 2}, {1, 3, 8}), -kLr * ((1.0 + 3.0) / 2 + 8.0));
}

TEST(Steps, AWindowDoesNotReachIntoTheNextEpoch) {
  EXPECT_DOUBLE_EQ(weight_after<Line>({.max_epochs = 2, .accumulate_grad_batches = 4}, {1, 3, 8}), -kLr * 4.0 * 2);
}

// Returns no loss for a negative x.
struct SkipsNegative : Line {
  int backwards = 0;
  std::vector<bool> had_loss;
  at::Tensor training_step(const Batch& batch, int64_t i) override {
    return batch["x"].item<float>() < 0 ? at::Tensor() : Line::training_step(batch, i);
  }
  void on_before_backward(const at::Tensor&) override { ++backwards; }
  void on_train_batch_end(const at::Tensor& loss, const Batch&, int64_t) override {
    had_loss.push_back(loss.defined());
  }
};

TEST(Steps, ABatchWithoutALossIsSkipped) {
  const auto module = make_module<SkipsNegative>();
  Trainer trainer(quiet());
  trainer.fit(module, {.train = loader_of({1, -1, 2})});
  EXPECT_EQ(trainer.state().global_step, 2);
  EXPECT_EQ(trainer.state().batches_that_stepped, 2);
  EXPECT_EQ(module->backwards, 2);
  EXPECT_THAT(module->had_loss, ElementsAre(true, false, true));
  EXPECT_DOUBLE_EQ(module->w.item<double>(), -kLr * 3.0);
}

TEST(Steps, ASkippedBatchDoesNotCountInTheMeanOfItsWindow) {
  EXPECT_DOUBLE_EQ(weight_after<SkipsNegative>({.accumulate_grad_batches = 3}, {1, -1, 2}), -kLr * 1.5);
  EXPECT_DOUBLE_EQ(weight_after<SkipsNegative>({.accumulate_grad_batches = 2}, {-1, 2, 3, -1}), -kLr * (2.0 + 3.0));
}

TEST(Steps, AWindowOfSkippedBatchesIsNoStep) {
  Trainer trainer(quiet({.accumulate_grad_batches = 2}));
  trainer.fit(make_module<SkipsNegative>(), {.train = loader_of({-1, -1, 1, 1})});
  EXPECT_EQ(trainer.state().global_step, 1);
}

TEST(Steps, AccumulationMayChangeFromTheNextEpochOn) {
  Trainer trainer(quiet({.max_epochs = 2, .callbacks = {at_batch_end([](auto& run) { run.set_accumulation(2); })}}));
  trainer.fit(make_module<Line>(), {.train = loader_of({1, 2, 3, 4})});
  EXPECT_EQ(trainer.state().global_step, 4 + 2);
}

// A schedule that divides the learning rate by ten at every step.
struct Scheduled : Line {
  int64_t moves = 0, epochs_ended = 0;
  Optimizers configure_optimizers() override {
    return {optim::SGD(parameters(), {.lr = kLr}),
            {.scheduler = optim::StepLR::make({.step_size = 1}), .interval = "step"}};
  }
  void lr_scheduler_step(LRSchedule& schedule, std::optional<double> metric) override {
    ++moves;
    Line::lr_scheduler_step(schedule, metric);
  }
  void on_train_epoch_end() override { ++epochs_ended; }
};

TEST(Steps, AnUpdateThatIsLeftOutIsNoStep) {
  struct EveryOther : Scheduled {
    int64_t asked = 0;
    void optimizer_step(Optimizer&, const std::function<void()>& step) override {
      if (asked++ % 2 == 0) step();
    }
  };
  const auto module = make_module<EveryOther>();
  Trainer trainer(quiet());
  trainer.fit(module, {.train = loader_of({1, 2, 3, 4})});
  EXPECT_EQ(trainer.state().global_step, 2);
  EXPECT_EQ(trainer.state().batches_that_stepped, 2);
  EXPECT_EQ(module->moves, 2);
  EXPECT_NEAR(module->w.item<double>(), -kLr * (1.0 + 0.1 * 3.0), 1e-6);
}

TEST(Steps, AnUpdateWithAClosureThatIsLeftOutIsNoStep) {
  struct LeftOut : Line {
    int64_t trained = 0;
    at::Tensor training_step(const Batch& batch, int64_t i) override {
      ++trained;
      return Line::training_step(batch, i);
    }
    Optimizers configure_optimizers() override {
      return optim::TorchOptimizer(torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(kLr)));
    }
    void optimizer_step(Optimizer&, const std::function<void()>&) override {}
  };
  const auto module = make_module<LeftOut>();
  Trainer trainer(quiet());
  trainer.fit(module, {.train = loader_of({1, 2})});
  EXPECT_EQ(module->trained, 0);  // the closure runs training_step, and is not called
  EXPECT_EQ(trainer.state().global_step, 0);
  EXPECT_EQ(trainer.state().batches_that_stepped, 0);
}

TEST(Steps, AnEpochWithoutAnyIsWarnedOfOnce) {
  ::testing::internal::CaptureStderr();
  Trainer(quiet({.max_epochs = 4})).fit(make_module<SkipsNegative>(), {.train = loader_of({-1, -2})});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("epoch 0 ended without an optimizer step"));
  EXPECT_EQ(told.find("without an optimizer step"), told.rfind("without an optimizer step"));
}

// Skips the rest of each epoch at its third batch.
struct SkipEpoch : Callback {
  BatchAction on_train_batch_start(TrainerControl&, const Batch&, int64_t batch_idx) override {
    return batch_idx == 2 ? BatchAction::skip_epoch : BatchAction::run;
  }
};

TEST(SkipEpoch, OfACallbackEndsTheEpochNotTheRun) {
  const auto module = make_module<CountingModule>();
  Trainer trainer(quiet({.max_epochs = 2, .callbacks = {std::make_shared<SkipEpoch>()}}));
  trainer.fit(module, {.train = tiny_loader(40, 8), .val = tiny_loader(8, 8)});
  EXPECT_EQ(module->trained, 2 + 2);
  EXPECT_EQ(trainer.state().epoch, 2);
  EXPECT_EQ(module->validated, 0);  // validation is due at the end of the epoch, which is never reached
}

TEST(SkipEpoch, OfTheModuleStillEndsTheEpochWithHooksAndSchedules) {
  struct Skipping : Scheduled {
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = kLr}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
    BatchAction on_train_batch_start(const Batch& batch, int64_t) override {
      return batch["x"].item<float>() == 0 ? BatchAction::skip_epoch : BatchAction::run;
    }
  };
  const auto module = make_module<Skipping>();
  Trainer(quiet({.max_epochs = 2})).fit(module, {.train = loader_of({1, 2, 0, 100})});
  EXPECT_EQ(module->epochs_ended, 2);
  EXPECT_EQ(module->moves, 2);
  EXPECT_NEAR(module->w.item<double>(), -kLr * (3.0 + 0.1 * 3.0), 1e-6);
}

TEST(SkipEpoch, OfTheLastBatchStillMovesTheSchedule) {
  struct Skipping : Scheduled {
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = kLr}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
    BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
      return batch_idx == 1 ? BatchAction::skip_epoch : BatchAction::run;
    }
  };
  const auto module = make_module<Skipping>();
  Trainer(quiet({.max_epochs = 3})).fit(module, {.train = loader_of({1, 2})});
  EXPECT_EQ(module->moves, 3);
}

TEST(SkipEpoch, TakesTheStepOfAWindowThatHasBegun) {
  const auto module = make_module<Scheduled>();
  Trainer trainer(quiet({.accumulate_grad_batches = 4, .callbacks = {std::make_shared<SkipEpoch>()}}));
  trainer.fit(module, {.train = loader_of({1, 2, 3, 4})});
  EXPECT_DOUBLE_EQ(module->w.item<double>(), -kLr * 1.5);
  EXPECT_EQ(trainer.state().global_step, 1);
  EXPECT_EQ(trainer.state().batches_that_stepped, 1);
  EXPECT_EQ(module->moves, 1);
}

// Returns the steps of the metrics that loggers are sent.
std::vector<int64_t> logged_steps(TrainerOptions options, int64_t num_samples = 40) {
  struct Steps : Callback {
    std::vector<int64_t> steps;
    void on_metrics(TrainerControl&, const Metrics& metrics, int64_t step) override {
      if (metrics.contains("train_loss")) steps.push_back(step);
    }
  };
  const auto callback = std::make_shared<Steps>();
  options.callbacks.push_back(callback);
  Trainer(quiet(std::move(options))).fit(make_module<CountingModule>(), {.train = tiny_loader(num_samples, 4)});
  return callback->steps;
}

TEST(LogEveryNSteps, SendsEveryNthStep) {
  EXPECT_THAT(logged_steps({.log_every_n_steps = 3}), ElementsAre(2, 5, 8));
  EXPECT_THAT(logged_steps({.max_epochs = 2, .limit_train_batches = Batches(2), .log_every_n_steps = 3}),
              ElementsAre(2));
}

TEST(LogEveryNSteps, IsTheStepsOfAnEpochOrRunWithFewerThanFifty) {
  EXPECT_THAT(logged_steps({.max_epochs = 2}), ElementsAre(9, 19));
  EXPECT_THAT(logged_steps({.max_epochs = 2, .accumulate_grad_batches = 3}), ElementsAre(3, 7));
  EXPECT_THAT(logged_steps({.max_steps = 4}), ElementsAre(3));
  EXPECT_THAT(logged_steps({}, 4 * 120), ElementsAre(49, 99));
}

TEST(LogEveryNSteps, CountsStepsNotBatches) {
  EXPECT_THAT(logged_steps({.accumulate_grad_batches = 2, .log_every_n_steps = 2}), ElementsAre(1, 3));
}

TEST(LogEveryNSteps, TheLastStepBeforeAStopIsSent) {
  EXPECT_THAT(logged_steps({.log_every_n_steps = 3, .callbacks = {stop_at_batch(5)}}), ElementsAre(2, 4));
}

// Records what loggers get: the metrics and their step.
struct Sent : Callback {
  std::vector<std::pair<Metrics, int64_t>> metrics;
  void on_metrics(TrainerControl&, const Metrics& values, int64_t step) override { metrics.emplace_back(values, step); }
};

TEST(StepMetrics, ReachLoggersFromEveryHookOfTheBatch) {
  struct Logging : Line {
    BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
      log("first", batch_idx);
      return BatchAction::run;
    }
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override { log("last", batch_idx); }
  };
  const auto sent = std::make_shared<Sent>();
  Trainer(quiet({.log_every_n_steps = 1, .callbacks = {sent}}))
      .fit(make_module<Logging>(), {.train = loader_of({1, 2})});
  ASSERT_EQ(sent->metrics.size(), 2U);
  EXPECT_EQ(sent->metrics[1].first, (Metrics{{"first", 1}, {"last", 1}}));
}

TEST(StepMetrics, AMetricNamedStepTakesThePlaceOfTheStep) {
  struct Logging : Line {
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override {
      log("a", 1);
      log("step", 100 + batch_idx);
    }
  };
  const auto sent = std::make_shared<Sent>();
  Trainer(quiet({.log_every_n_steps = 1, .callbacks = {sent}}))
      .fit(make_module<Logging>(), {.train = loader_of({1, 2})});
  ASSERT_EQ(sent->metrics.size(), 2U);
  EXPECT_EQ(sent->metrics[1], (std::pair(Metrics{{"a", 1}}, int64_t{101})));
}

// Loggers get the later value, which callback_metrics() has too.
TEST(EpochMetrics, OfANameThatTwoHooksLogLoggersGetWhatCallbacksRead) {
  struct Logging : Line {
    at::Tensor training_step(const Batch& batch, int64_t i) override {
      log("trained", 1, {.on_step = false, .on_epoch = true});
      return Line::training_step(batch, i);
    }
    void on_train_epoch_end() override { log("trained", 2); }
    void validation_step(const Batch&, int64_t) override { log("validated", 3); }
    void on_validation_epoch_end() override { log("validated", 4); }
  };
  const auto sent = std::make_shared<Sent>();
  Trainer trainer(quiet({.num_sanity_val_steps = 0, .callbacks = {sent}}));
  trainer.fit(make_module<Logging>(), {.train = loader_of({1, 2}), .val = loader_of({1})});
  ASSERT_EQ(sent->metrics.size(), 2U);
  EXPECT_EQ(sent->metrics[0].first, (Metrics{{"validated", 4}}));
  EXPECT_EQ(sent->metrics[1].first, (Metrics{{"trained", 2}}));
  EXPECT_EQ(trainer.callback_metrics(), (Metrics{{"trained", 2}, {"validated", 4}}));
}

size_t count_of(const std::string& what, const std::string& text) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

template <class M>
std::string told_by(TrainerOptions options, Loaders loaders) {
  ::testing::internal::CaptureStderr();
  Trainer(quiet(std::move(options))).fit(make_module<M>(), std::move(loaders));
  return ::testing::internal::GetCapturedStderr();
}

TEST(Steps, AScheduleWhoseMetricIsNotThereYetSaysSoOnce) {
  struct Waiting : Line {
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = kLr}),
              {.scheduler = optim::ReduceLROnPlateau::make({}),
               .interval = "step",
               .monitor = "val_loss",
               .strict = false}};
    }
  };
  EXPECT_EQ(count_of("the learning rate stays", told_by<Waiting>({}, {.train = loader_of({1, 2, 3, 4})})), 1U);
}

// Warms up over three steps, then halves the learning rate whenever val_loss, which never changes, is not better.
template <bool logs_monitor>
struct WarmsUp : Line {
  std::vector<double> lrs;
  void on_before_optimizer_step(Optimizer& optimizer) override { lrs.push_back(optimizer.groups()[0].lr); }
  void validation_step(const Batch&, int64_t) override { log(logs_monitor ? "val_loss" : "other", 1.0); }
  Optimizers configure_optimizers() override {
    return {optim::SGD(parameters(), {.lr = 1.0}),
            {.scheduler = optim::ChainedScheduler::make(
                 {.schedulers = {optim::LinearLR::make({.start_factor = 0.25, .total_iters = 3}),
                                 optim::ReduceLROnPlateau::make({.factor = 0.5, .patience = 0})}}),
             .interval = "step",
             .monitor = "val_loss"}};
  }
};

TEST(Steps, AWarmUpInFrontOfAPlateauDoesNotWaitForTheFirstValidation) {
  const auto loaders = [] { return Loaders{.train = loader_of({1, 2, 3, 4}), .val = loader_of({1})}; };
  const auto module = make_module<WarmsUp<true>>();
  Trainer(quiet({.max_epochs = 2})).fit(module, loaders());
  EXPECT_THAT(module->lrs, ::testing::Pointwise(::testing::DoubleNear(1e-12),
                                                std::vector{0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.25, 0.125}));
  const auto unknown = make_module<WarmsUp<false>>();
  EXPECT_THAT(testing::message_of<SetupError>([&] { Trainer(quiet({.max_epochs = 2})).fit(unknown, loaders()); }),
              HasSubstr("unknown monitor 'val_loss'"));
  EXPECT_EQ(unknown->lrs.size(), 4U);  // the validation after the last of them has not logged it
}

// The loss is finite up to the third batch.
struct Diverges : Line {
  at::Tensor training_step(const Batch& batch, int64_t i) override {
    const at::Tensor loss = Line::training_step(batch, i);
    log("train_loss", loss);
    return loss;
  }
  void validation_step(const Batch& batch, int64_t) override { log("val_loss", (w * batch["x"]).mean()); }
};

TEST(NonFinite, IsSaidOnceWithNameAndStep) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto loaders = [&] { return Loaders{.train = loader_of({1, 2, inf, 3, 4}), .val = loader_of({1})}; };
  const std::string told = told_by<Diverges>({.max_epochs = 2, .log_every_n_steps = 2}, loaders());
  EXPECT_EQ(count_of("the loss is -inf at step 2 (epoch 0)", told), 1U) << told;
  EXPECT_EQ(count_of("train_loss is -inf at step 3 (epoch 0)", told), 1U) << told;
  EXPECT_EQ(count_of("val_loss is NaN at step 4 (epoch 0)", told), 1U) << told;
  EXPECT_EQ(count_of("detect_anomaly = true", told), 3U) << told;
  EXPECT_EQ(count_of("detect_anomaly", told_by<Diverges>({}, {.train = loader_of({1, 2}), .val = loader_of({1})})), 0U);
}

}  // namespace
}  // namespace fulgur
