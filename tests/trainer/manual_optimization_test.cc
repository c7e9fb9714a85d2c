#include "fulgur/core/manual_optimization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/gradient_accumulation_scheduler.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace F = torch::nn::functional;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

constexpr double kMean = 3.0;

// A generator that learns to draw from a normal distribution, against a discriminator.
struct Gan : Module {
  torch::nn::Sequential generator{torch::nn::Linear(2, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1)};
  torch::nn::Sequential discriminator{torch::nn::Linear(1, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1)};
  bool gradients_stay_apart = true;

  Gan() {
    automatic_optimization = false;
    register_module("generator", generator);
    register_module("discriminator", discriminator);
  }

  at::Tensor draw(int64_t size) { return generator->forward(torch::randn({size, 2})); }

  at::Tensor verdict_loss(const at::Tensor& x, double truth) {
    const at::Tensor verdict = discriminator->forward(x);
    return F::binary_cross_entropy_with_logits(verdict, torch::full_like(verdict, truth));
  }

  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor fake = draw(batch.batch_size()).detach();
    const at::Tensor discriminator_loss = verdict_loss(batch["real"], 1.0) + verdict_loss(fake, 0.0);
    auto by_discriminator = optimizer(1);
    by_discriminator.zero_grad();
    manual_backward(discriminator_loss);
    by_discriminator.step();

    const auto toggled = toggle_optimizer(0);
    gradients_stay_apart &= !discriminator->parameters()[0].requires_grad();
    const at::Tensor generator_loss = verdict_loss(draw(batch.batch_size()), 1.0);
    auto by_generator = optimizer(0);
    by_generator.zero_grad();
    manual_backward(generator_loss);
    by_generator.step();
    log("generator_loss", generator_loss);
    log("discriminator_loss", discriminator_loss);
    return {};
  }

  void on_train_epoch_end() override { lr_scheduler(0).step(); }

  Optimizers configure_optimizers() override {
    Optimizers both;
    both.add(optim::AdamW(generator->parameters(), {.lr = 5e-3, .betas = {0.5, 0.99}}),
             {.scheduler = optim::ExponentialLR::make({.gamma = 0.9})});
    both.add(optim::AdamW(discriminator->parameters(), {.lr = 5e-3, .betas = {0.5, 0.99}}));
    return both;
  }
};

TEST(ManualOptimization, AGanLearnsADistribution) {
  seed_everything(1);
  const auto data = TensorDataset::make({{"real", torch::randn({640, 1}) * 0.5 + kMean}});
  const auto gan = make_module<Gan>();
  const double before = gan->draw(512).mean().item<double>();
  Trainer trainer(quiet({.max_epochs = 30}));
  trainer.fit(gan, {.train = DataLoader::make(data, {.batch_size = 32})});
  const double after = gan->draw(512).mean().item<double>();
  EXPECT_GT(std::abs(before - kMean), 1.0);
  EXPECT_LT(std::abs(after - kMean), 0.5);
  EXPECT_TRUE(gan->gradients_stay_apart);
  EXPECT_TRUE(gan->discriminator->parameters()[0].requires_grad());
  EXPECT_EQ(trainer.state().global_step, 30 * 20 * 2);  // each optimizer's steps count
  EXPECT_TRUE(trainer.callback_metrics().contains("generator_loss"));
}

// Runs a given function as its manual training_step.
struct Manual : TinyModule {
  explicit Manual(std::function<void(Manual&, const Batch&)> given) : step(std::move(given)) {
    automatic_optimization = false;
  }
  std::function<void(Manual&, const Batch&)> step;
  at::Tensor training_step(const Batch& batch, int64_t) override {
    step(*this, batch);
    return {};
  }
};

TEST(ManualOptimization, EqualsAutomaticBitForBit) {
  const auto automatic = make_module<TinyModule>();
  std::vector<double> losses;
  const auto manual = make_module<Manual>([&](Manual& self, const Batch& batch) {
    const at::Tensor loss = self.loss(batch);
    losses.push_back(loss.item<double>());
    self.optimizer().zero_grad();
    self.manual_backward(loss);
    self.optimizer().step();
  });
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < 4; ++i) manual->parameters()[i].copy_(automatic->parameters()[i]);
  }
  Trainer(quiet({.max_epochs = 2})).fit(automatic, {.train = tiny_loader()});
  Trainer(quiet({.max_epochs = 2})).fit(manual, {.train = tiny_loader()});
  EXPECT_EQ(losses, automatic->train_losses);
}

TEST(ManualOptimization, TheUserStepsTheSchedules) {
  struct Scheduled : Manual {
    using Manual::Manual;
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {.lr = 1.0}), {.scheduler = optim::ExponentialLR::make({.gamma = 0.5})}};
    }
  };
  std::vector<double> lrs;
  const auto module = make_module<Scheduled>([&](Manual& self, const Batch&) {
    lrs.push_back(self.optimizer().groups()[0].lr);
    if (self.global_step() == 0 && lrs.size() % 2 == 0) self.lr_scheduler().step();
  });
  Trainer(quiet({.max_epochs = 1})).fit(module, {.train = tiny_loader(40, 8)});
  EXPECT_THAT(lrs, ElementsAre(1.0, 1.0, 0.5, 0.5, 0.25));
}

TEST(ManualOptimization, ToggleLeavesFrozenParametersFrozen) {
  const auto module =
      make_module<Manual>([](Manual& self, const Batch&) { const auto guard = self.toggle_optimizer(0); });
  module->hidden->weight.requires_grad_(false);
  Trainer(quiet()).fit(module, {.train = tiny_loader(8, 8)});
  EXPECT_FALSE(module->hidden->weight.requires_grad());
  EXPECT_TRUE(module->out->weight.requires_grad());
}

TEST(ManualOptimization, AnomaliesAreDetectedInWhatTheStepReturns) {
  struct NaN : TinyModule {
    NaN() { automatic_optimization = false; }
    at::Tensor training_step(const Batch& batch, int64_t) override { return loss(batch) / 0.0 * 0.0; }
  };
  EXPECT_THAT(message_of<c10::Error>(
                  [] { Trainer(quiet({.detect_anomaly = true})).fit(make_module<NaN>(), {.train = tiny_loader()}); }),
              HasSubstr("nan for batch 0"));
}

TEST(ManualOptimization, WhatTheStepReturnsMayBeAVector) {
  struct Vector : TinyModule {
    explicit Vector(double given) : divisor(given) { automatic_optimization = false; }
    at::Tensor training_step(const Batch& batch, int64_t) override {
      return loss(batch).reshape({1}).expand({3}) / divisor;
    }
    double divisor;
  };
  const auto fit = [](double divisor) {
    Trainer(quiet({.detect_anomaly = true})).fit(make_module<Vector>(divisor), {.train = tiny_loader()});
  };
  EXPECT_NO_THROW(fit(1.0));
  EXPECT_THAT(message_of<c10::Error>([&] { fit(0.0); }), HasSubstr("inf for batch 0"));
}

// An optimizer that evaluates the loss several times in a step.
TEST(ClosureOptimizer, LBFGSFitsALeastSquaresProblem) {
  struct Linear : Module {
    torch::nn::Linear layer{nullptr};
    int evaluations = 0;
    Linear() { layer = register_module("layer", torch::nn::Linear(4, 1)); }
    at::Tensor training_step(const Batch& batch, int64_t) override {
      ++evaluations;
      return F::mse_loss(layer->forward(batch["x"]), batch["y"]);
    }
    Optimizers configure_optimizers() override {
      return optim::TorchOptimizer(torch::optim::LBFGS(
          parameters(), torch::optim::LBFGSOptions(1.0).max_iter(20).line_search_fn("strong_wolfe")));
    }
  };
  const auto data = testing::tiny_dataset(40);
  const Batch all = data->samples();
  const at::Tensor x = torch::cat({all["x"], torch::ones({40, 1})}, 1).to(torch::kDouble);
  const at::Tensor solution = std::get<0>(torch::linalg_lstsq(x, all["y"].to(torch::kDouble)));
  const double least = (x.mm(solution) - all["y"]).square().mean().item<double>();

  const auto module = make_module<Linear>();
  Trainer trainer(quiet({.max_epochs = 2}));
  trainer.fit(module, {.train = DataLoader::make(data, {.batch_size = 40})});
  const double reached = F::mse_loss(module->layer->forward(all["x"]), all["y"]).item<double>();
  EXPECT_NEAR(reached, least, 1e-5 * least);
  EXPECT_EQ(trainer.state().global_step, 2);
  EXPECT_GT(module->evaluations, 4);
}

TEST(ClosureOptimizer, RefusesAccumulation) {
  struct Closure : TinyModule {
    Optimizers configure_optimizers() override { return optim::TorchOptimizer(torch::optim::LBFGS(parameters())); }
  };
  Trainer trainer(quiet({.accumulate_grad_batches = 2}));
  EXPECT_THAT(message_of<SetupError>([&] { trainer.fit(make_module<Closure>(), {.train = tiny_loader()}); }),
              HasSubstr("accumulate_grad_batches = 2 must be 1"));
}

TEST(ClosureOptimizer, RefusesAScheduleOfAccumulationAndManualOptimisation) {
  struct Closure : TinyModule {
    Optimizers configure_optimizers() override { return optim::TorchOptimizer(torch::optim::LBFGS(parameters())); }
  };
  TrainerOptions options = quiet();
  options.callbacks = {GradientAccumulationScheduler::make({{0, 4}})};
  EXPECT_THAT(message_of<SetupError>([&] { Trainer(options).fit(make_module<Closure>(), {.train = tiny_loader()}); }),
              HasSubstr("GradientAccumulationScheduler has the factor 4 from epoch 0 on; leave the callback out"));
  const auto manual = make_module<Closure>();
  manual->automatic_optimization = false;
  EXPECT_THAT(message_of<SetupError>([&] { Trainer(quiet()).fit(manual, {.train = tiny_loader()}); }),
              HasSubstr("leave automatic_optimization true"));
}

TEST(ClosureOptimizer, GradientsAreClippedInEveryEvaluation) {
  struct Clipped : TinyModule {
    double largest = 0.0;
    Optimizers configure_optimizers() override {
      return optim::TorchOptimizer(torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(1e-3).max_iter(3)));
    }
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
      largest = std::max(largest, gradient_norm(parameters()).item<double>());
    }
  };
  const auto module = make_module<Clipped>();
  Trainer(quiet({.gradient_clip_val = 1e-3})).fit(module, {.train = tiny_loader()});
  EXPECT_GT(module->largest, 0.9e-3);
  EXPECT_LT(module->largest, 1.001e-3);
}

TEST(TorchOptimizer, UpdatesATiedParameterOnce) {
  const at::Tensor tied = torch::ones({2}).requires_grad_();
  optim::TorchOptimizer optimizer(torch::optim::SGD(std::vector{tied, tied}, 0.5));
  tied.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_TRUE(tied.equal(torch::full({2}, 0.5)));
}

TEST(ManualOptimization, APlateauNeedsItsMetric) {
  struct Scheduled : Manual {
    using Manual::Manual;
    Optimizers configure_optimizers() override {
      return {optim::SGD(parameters(), {}), {.scheduler = optim::ReduceLROnPlateau::make({}), .monitor = "train_loss"}};
    }
  };
  const auto module = make_module<Scheduled>([](Manual& self, const Batch&) { self.lr_scheduler().step(); });
  EXPECT_THAT(message_of<c10::ValueError>([&] { Trainer(quiet()).fit(module, {.train = tiny_loader()}); }),
              HasSubstr("looks at a metric; give its value to step()"));
}

}  // namespace
}  // namespace fulgur
