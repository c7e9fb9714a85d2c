// Training by the Trainer against the same training written out by hand.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <optional>
#include <vector>

#include "fulgur/optim/adam.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

constexpr double kLr = 1e-2;
constexpr int64_t kEpochs = 4;

// Computes what TinyModule computes, without modules.
struct ByHand {
  std::vector<at::Tensor> params;
  explicit ByHand(const TinyModule& module) {
    for (const at::Tensor& param : module.parameters()) params.push_back(param.detach().clone().requires_grad_());
  }
  at::Tensor loss(const Batch& batch) const {
    const at::Tensor hidden = at::linear(batch["x"], params[0], params[1]).tanh();
    return at::mse_loss(at::linear(hidden, params[2], params[3]), batch["y"]);
  }
};

double norm_of_gradients(const std::vector<at::Tensor>& params) {
  double squares = 0.0;
  for (const at::Tensor& param : params) squares += param.grad().to(at::kDouble).square().sum().item<double>();
  return std::sqrt(squares);
}

struct Recipe {
  int64_t accumulate = 1;
  double clip_norm = 0.0;
  double clip_value = 0.0;
  bool cosine = false;
};
constexpr int64_t kBatches = 5;  // an epoch of 40 samples

int64_t steps_in_epoch(const Recipe& recipe) { return (kBatches + recipe.accumulate - 1) / recipe.accumulate; }

// Returns the losses of all batches. The gradients of an accumulation window are summed; the update takes the factor
// of the mean and of clipping.
template <class Optimizer, class Options>
std::vector<double> train_by_hand(const TinyModule& module, const Recipe& recipe, const Options& options) {
  const ByHand net(module);
  Optimizer optimizer(net.params, options);
  const auto loader = tiny_loader(8 * kBatches, 8, /*shuffle=*/true);
  const auto num_steps = static_cast<double>(kEpochs * steps_in_epoch(recipe));
  std::vector<double> losses;
  double step = 0.0;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    loader->begin_epoch(epoch);
    for (int64_t first = 0; first < kBatches; first += recipe.accumulate) {
      const int64_t window = std::min(recipe.accumulate, kBatches - first);
      for (const at::Tensor& param : net.params) param.mutable_grad().reset();
      for (int64_t i = 0; i < window; ++i) {
        const at::Tensor loss = net.loss(*loader->next());
        losses.push_back(loss.item<double>());
        loss.backward();
      }
      double factor = 1.0 / static_cast<double>(window);
      if (recipe.clip_norm > 0.0) {
        factor *= std::min(1.0, recipe.clip_norm / (norm_of_gradients(net.params) * factor + 1e-6));
      }
      GradientTransform transform{.factor = at::scalar_tensor(factor, at::kDouble)};
      if (recipe.clip_value > 0.0) transform.clip_value = recipe.clip_value;
      if (recipe.cosine) optimizer.groups()[0].lr = kLr * (1.0 + std::cos(std::numbers::pi * step / num_steps)) / 2.0;
      optimizer.step(transform);
      ++step;
    }
  }
  return losses;
}

template <class Optimizer, class Options>
std::vector<double> train(const Recipe& recipe, const Options& given, const std::shared_ptr<TinyModule>& weights) {
  struct Net : TinyModule {
    Net(const Recipe& made_by, const Options& its_options) : recipe(made_by), options(its_options) {}
    Recipe recipe;
    Options options;
    Optimizers configure_optimizers() override {
      Optimizers optimizers = Optimizer(parameters(), options);
      if (recipe.cosine) {
        const int64_t num_steps = run_state().estimated_stepping_batches.value();
        optimizers.add_scheduler(
            {.scheduler = optim::CosineAnnealingLR::make({.T_max = num_steps}), .interval = "step"});
      }
      return optimizers;
    }
  };
  const auto module = make_module<Net>(recipe, given);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights->parameters().size(); ++i) module->parameters()[i].copy_(weights->parameters()[i]);
  const at::AutoGradMode grad(true);
  TrainerOptions options{.max_epochs = kEpochs, .accumulate_grad_batches = recipe.accumulate};
  options.gradient_clip_val = std::max(recipe.clip_norm, recipe.clip_value);
  options.gradient_clip_algorithm = recipe.clip_value > 0.0 ? "value" : "norm";
  Trainer(quiet(options)).fit(module, {.train = tiny_loader(8 * kBatches, 8, /*shuffle=*/true)});
  return module->train_losses;
}

template <class Optimizer, class Options>
void expect_parity(const Recipe& recipe, const Options& options) {
  seed_everything(5);
  const auto weights = make_module<TinyModule>();
  const auto expected = train_by_hand<Optimizer>(*weights, recipe, options);
  ASSERT_EQ(expected.size(), static_cast<size_t>(kEpochs * kBatches));
  EXPECT_LT(std::accumulate(expected.end() - kBatches, expected.end(), 0.0),  // the loss falls
            std::accumulate(expected.begin(), expected.begin() + kBatches, 0.0));
  EXPECT_EQ((train<Optimizer>(recipe, options, weights)), expected);
}

const Recipe kRecipes[] = {{},
                           {.accumulate = 2},  // the last accumulation window of an epoch is one batch short
                           {.clip_norm = 0.5},
                           {.clip_value = 0.02},
                           {.cosine = true},
                           {.accumulate = 3, .clip_norm = 0.5, .cosine = true}};

class Parity : public ::testing::TestWithParam<Recipe> {};

TEST_P(Parity, AdamW) { expect_parity<optim::AdamW>(GetParam(), optim::AdamWOptions{.lr = kLr}); }

TEST_P(Parity, SGDWithMomentum) {
  expect_parity<optim::SGD>(GetParam(), optim::SGDOptions{.lr = kLr, .momentum = 0.9});
}

INSTANTIATE_TEST_SUITE_P(, Parity, ::testing::ValuesIn(kRecipes));

TEST(ParityWithTorch, AdamW) {
  const auto module = make_module<TinyModule>();
  const ByHand net(*module);
  torch::optim::AdamW optimizer(net.params, torch::optim::AdamWOptions(kLr));
  const auto loader = tiny_loader(8 * kBatches, 8, /*shuffle=*/true);
  std::vector<double> expected;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    loader->begin_epoch(epoch);
    while (const auto batch = loader->next()) {
      optimizer.zero_grad();
      const at::Tensor loss = net.loss(*batch);
      expected.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
    }
  }
  Trainer(quiet({.max_epochs = kEpochs})).fit(module, {.train = loader});
  ASSERT_EQ(expected.size(), 20U);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(module->train_losses[i], expected[i], 1e-6 * expected[i]) << "step " << i;
  }
}

}  // namespace
}  // namespace fulgur
