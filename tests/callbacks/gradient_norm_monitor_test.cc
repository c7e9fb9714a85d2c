#include "fulgur/callbacks/gradient_norm_monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>

#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"
#include "tests/testing/without_warmup.h"

namespace fulgur {
namespace {

constexpr int64_t kSteps = 3, kSamplesPerStep = 8;

// The weights stay as they are, so that each step's gradient is known.
struct Resting : testing::TinyModule {
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.0}); }
};

std::shared_ptr<Resting> resting() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  seed_everything(3);
  return make_module<Resting>();
}

// By autograd, over all samples of each step.
std::vector<double> norms_by_formula() {
  const auto net = resting();
  const auto data = testing::tiny_dataset(kSteps * kSamplesPerStep);
  std::vector<double> norms;
  for (int64_t step = 0; step < kSteps; ++step) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (auto& param : net->parameters()) param.mutable_grad().reset();
    for (int64_t i = step * kSamplesPerStep; i < (step + 1) * kSamplesPerStep; ++i) {
      const Batch sample = data->get(i);
      const Batch batch{{"x", sample["x"].unsqueeze(0)}, {"y", sample["y"].unsqueeze(0)}};
      net->loss(batch).div(kSamplesPerStep).backward();
    }
    for (const auto& param : net->parameters()) sum += param.grad().to(at::kDouble).square().sum();
    norms.push_back(std::sqrt(sum.item<double>()));
  }
  return norms;
}

class Recorder final : public Callback {
 public:
  std::vector<double> norms;
  void on_metrics(TrainerControl&, const Metrics& metrics, int64_t) override {
    if (const auto norm = metrics.find("grad_norm"); norm != metrics.end()) norms.push_back(norm->second);
  }
};

// The norms that the last rank logs, in steps of two micro-batches.
std::vector<double> norms_of(const std::string& strategy, int64_t world_size, TrainerOptions options) {
  std::vector<double> norms;
  const auto fit = [&](bool keeps) {
    const auto recorder = std::make_shared<Recorder>();
    TrainerOptions own = options;
    own.strategy = testing::without_warmup(strategy);
    if (strategy != "dp") own.devices = world_size;
    own.accumulate_grad_batches = 2;
    own.log_every_n_steps = 1;
    own.callbacks = {GradientNormMonitor::make(), recorder};
    const int64_t batch_size = kSamplesPerStep / 2 / world_size;
    Trainer(testing::quiet(own)).fit(resting(), {.train = testing::tiny_loader(kSteps * kSamplesPerStep, batch_size)});
    if (keeps) norms = recorder->norms;
  };
  if (world_size == 1) {
    fit(true);
  } else {
    testing::run_ranks(world_size, [&](World& world) { fit(world.rank() == world_size - 1); });
  }
  return norms;
}

TEST(GradientNormMonitor, LogsTheNormOfTheMeanGradientUnderEveryStrategy) {
  const std::vector<double> expected = norms_by_formula();
  for (const char* strategy : {"single_device", "ddp", "ddp_sharded", "zero_offload", "delayed_update"}) {
    for (const int64_t world_size : {1, 2}) {
      if (world_size > 1 && strategy == std::string_view("single_device")) continue;
      for (const double clip : {0.0, 0.01}) {  // 0: not clipped
        SCOPED_TRACE(c10::str(strategy, ", ", world_size, " ranks, clipped to ", clip));
        EXPECT_THAT(norms_of(strategy, world_size, {.gradient_clip_val = clip}),
                    ::testing::Pointwise(::testing::DoubleNear(1e-5), expected));
      }
    }
  }
  EXPECT_THAT(norms_of("dp", 1, {.devices = 2}), ::testing::Pointwise(::testing::DoubleNear(1e-5), expected));
  std::vector<double> scaled = norms_of("ddp", 1, {.precision = "16-mixed"});
  ASSERT_EQ(scaled.size(), 2U);  // the first step is skipped: the loss scale is too large for it
  scaled.insert(scaled.begin(), expected[0]);
  EXPECT_THAT(scaled, ::testing::Pointwise(::testing::DoubleNear(1e-2), expected));
}

// Clips the gradients itself.
struct Clipping : Resting {
  void configure_gradient_clipping(Optimizer& optimizer, const GradientClipping&) override {
    Module::clip_gradients(optimizer, {.value = 1e-3});
  }
};

TEST(GradientNormMonitor, LogsTheNormBeforeTheModuleClips) {
  const std::vector<double> expected = norms_by_formula();
  for (const char* strategy : {"single_device", "ddp_sharded", "delayed_update"}) {
    const auto recorder = std::make_shared<Recorder>();
    TrainerOptions options{.strategy = testing::without_warmup(strategy),
                           .callbacks = {GradientNormMonitor::make(), recorder}};
    options.log_every_n_steps = 1;
    const auto loader = testing::tiny_loader(kSteps * kSamplesPerStep, kSamplesPerStep);
    seed_everything(3);
    Trainer(testing::quiet(options)).fit(make_module<Clipping>(), {.train = loader});
    EXPECT_THAT(recorder->norms, ::testing::Pointwise(::testing::DoubleNear(1e-5), expected)) << strategy;
  }
}

struct OnRankZero final : Callback {
  bool runs_on_every_rank() const override { return false; }
  bool wants_grad_norm() const override { return true; }
};

TEST(GradientNormMonitor, ACallbackOfRankZeroCannotWantTheNorm) {
  const TrainerOptions options{.callbacks = {std::make_shared<OnRankZero>()}};
  EXPECT_THAT(testing::message_of<SetupError>(
                  [&] { Trainer(testing::quiet(options)).fit(resting(), {.train = testing::tiny_loader()}); }),
              ::testing::HasSubstr(
                  "OnRankZero wants gradients, their norm or averaged weights, which all ranks compute together"));
}

// Loses its loss in the second step.
struct Spoilt : testing::TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return TinyModule::training_step(batch, batch_idx).mul(batch_idx == 1 ? INFINITY : 1.0);
  }
};

TEST(GradientNormMonitor, LogsNothingForAStepThatWasSkipped) {
  const auto recorder = std::make_shared<Recorder>();
  TrainerOptions options{.precision = "16-mixed", .callbacks = {GradientNormMonitor::make(), recorder}};
  options.log_every_n_steps = 1;
  Trainer(testing::quiet(options)).fit(make_module<Spoilt>(), {.train = testing::tiny_loader(24, 8)});
  EXPECT_EQ(recorder->norms.size(), 2U);
}

TEST(GradientNormMonitor, RefusesAnOptimizerThatEvaluatesTheLossByItself) {
  struct ByLbfgs : testing::TinyModule {
    Optimizers configure_optimizers() override {
      return optim::TorchOptimizer(torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(0.1)));
    }
  };
  EXPECT_THAT(testing::message_of<SetupError>([] {
                Trainer(testing::quiet({.callbacks = {GradientNormMonitor::make()}}))
                    .fit(make_module<ByLbfgs>(), {.train = testing::tiny_loader()});
              }),
              ::testing::HasSubstr("so that a step has no gradient norm; leave GradientNormMonitor"));
}

}  // namespace
}  // namespace fulgur
