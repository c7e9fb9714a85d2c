#include "fulgur/callbacks/gradient_accumulation_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>

#include <memory>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

TEST(GradientAccumulationScheduler, ChangesTheFactorAtItsEpochs) {
  struct Counting : TinyModule {
    std::vector<int64_t> steps;
    void on_train_epoch_end() override { steps.push_back(global_step()); }
  };
  TrainerOptions options = quiet({.max_epochs = 4});
  options.callbacks = {GradientAccumulationScheduler::make({{1, 4}, {3, 3}})};
  const auto module = make_module<Counting>();
  Trainer(options).fit(module, {.train = tiny_loader(40, 8)});  // 5 batches
  EXPECT_THAT(module->steps, ElementsAre(5, 7, 9, 11));
}

TEST(GradientAccumulationScheduler, RefusesBadSchedulesAndContradictions) {
  const auto refusal = [](GradientAccumulationScheduler::Schedule schedule) {
    return message_of<UsageError>([&] { GradientAccumulationScheduler::make(schedule); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("the schedule is empty"));
  EXPECT_THAT(refusal({{-1, 2}}), HasSubstr("got {-1, 2}"));
  EXPECT_THAT(refusal({{0, 0}}), HasSubstr("got {0, 0}"));

  const auto fit_error = [](TrainerOptions options, bool automatic) {
    options = quiet(std::move(options));
    options.callbacks = {GradientAccumulationScheduler::make({{0, 2}})};
    const auto module = make_module<TinyModule>();
    module->automatic_optimization = automatic;
    return message_of<SetupError>([&] { Trainer(options).fit(module, {.train = tiny_loader()}); });
  };
  EXPECT_THAT(fit_error({.accumulate_grad_batches = 4}, true), HasSubstr("accumulate_grad_batches = 4"));
  EXPECT_THAT(fit_error({}, false), HasSubstr("optimises manually"));
}

TEST(GradientAccumulationScheduler, IsRefusedForLbfgsBeforeTraining) {
  struct WithLbfgs : TinyModule {
    Optimizers configure_optimizers() override {
      return optim::TorchOptimizer(torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(0.05)));
    }
  };
  const auto fit = [](const std::shared_ptr<WithLbfgs>& module, GradientAccumulationScheduler::Schedule schedule) {
    TrainerOptions options = quiet({.max_epochs = 1});
    options.callbacks = {GradientAccumulationScheduler::make(std::move(schedule))};
    Trainer(options).fit(module, {.train = tiny_loader()});
  };
  const auto module = make_module<WithLbfgs>();
  EXPECT_THAT(message_of<SetupError>([&] { fit(module, {{0, 1}, {7, 4}}); }),
              HasSubstr("has the factor 4 from epoch 7 on"));
  EXPECT_TRUE(module->train_losses.empty());
  fit(module, {{0, 1}});
  EXPECT_FALSE(module->train_losses.empty());
}

}  // namespace
}  // namespace fulgur
