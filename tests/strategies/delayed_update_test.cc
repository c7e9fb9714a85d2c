// Updates one step late, beside the recurrence written out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "core/error.h"
#include "core/gradient_clipping.h"
#include "optim/lr_schedulers.h"
#include "optim/sgd.h"
#include "strategies/presets.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using testing::Case;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Net;
using testing::run_ranks;
using testing::TinyModule;
using testing::train;

const std::vector<std::string> kBases{"single_device", "ddp", "ddp_sharded", "zero_offload"};

TEST(DelayedUpdateTest, IsItsBaseBitForBitWhileItWarmsUp) {
  for (const std::string& base : kBases) {
    for (const int64_t world_size : {1, 2}) {
      if (base == "single_device" && world_size > 1) continue;
      for (const Case& c : {Case{}, Case{.accumulate = 2, .clip = 0.05}, Case{.precision = "bf16-true"},
                            Case{.accumulate = 2, .precision = "bf16-true"}}) {
        run_ranks(world_size, [&](World& world) {
          const at::Tensor expected = train<Net<optim::AdamW>>(world, c, base);
          const DelayedUpdate delayed{.base = base, .warmup_steps = 1000, .reduce = "each_micro_batch"};
          EXPECT_TRUE(train<Net<optim::AdamW>>(world, c, delayed).equal(expected)) << base << world_size;
        });
      }
    }
  }
}

constexpr double kLr = 1e-2, kGamma = 0.5;
constexpr int64_t kEvery = 3;  // steps between changes of the learning rate

// Keeps its batches.
template <class O>
struct Recorded : TinyModule {
  std::vector<Batch> batches;
  Recorded() { seed(*this); }
  static void seed(torch::nn::Module& module) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : module.parameters()) parameter.normal_(0, 0.5, generator);
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    batches.push_back(batch);
    return TinyModule::training_step(batch, batch_idx);
  }
  Optimizers configure_optimizers() override {
    return {O(parameters(), {.lr = kLr}),
            {.scheduler = optim::StepLR::make({.step_size = kEvery, .gamma = kGamma}), .interval = "step"}};
  }
};

// theta_{i+1} uses g_{i-1}, with the settings of step i-1; synchronous at first.
template <class O>
std::vector<at::Tensor> recurrence(const std::vector<Batch>& batches, int64_t accumulate, double clip, int64_t warmup) {
  TinyModule net;  // at the parameters that training_step sees
  Recorded<O>::seed(net);
  std::vector<at::Tensor> owned;  // what is updated
  for (const at::Tensor& param : net.parameters()) owned.push_back(param.detach().clone().requires_grad_());
  O optimizer(owned, {.lr = kLr});
  struct Late {
    std::vector<at::Tensor> gradients;
    GradientTransform transform;
    double lr;
  };
  const auto apply = [&](const Late& late) {
    for (size_t i = 0; i < owned.size(); ++i) owned[i].mutable_grad() = late.gradients[i];
    optimizer.groups()[0].lr = late.lr;
    optimizer.step(late.transform);
    const c10::NoGradGuard no_grad;
    const auto params = net.parameters();
    for (size_t i = 0; i < owned.size(); ++i) at::Tensor(params[i]).copy_(owned[i]);
  };
  std::optional<Late> pending;
  int64_t step = 0;
  double lr = kLr;
  for (size_t begin = 0; begin < batches.size(); begin += static_cast<size_t>(accumulate), ++step) {
    net.zero_grad();
    for (int64_t k = 0; k < accumulate; ++k) net.loss(batches[begin + static_cast<size_t>(k)]).backward();
    Late now{.gradients = {}, .transform = {}, .lr = lr};
    for (const at::Tensor& param : net.parameters()) now.gradients.push_back(param.grad().clone());
    const double mean = 1.0 / static_cast<double>(accumulate);
    at::Tensor factor = torch::tensor(mean, at::kDouble);
    if (clip > 0) factor = clip_coefficient(joint_norm(now.gradients).mul(mean), clip).mul(mean);
    now.transform.factor = factor;
    if (pending) apply(*std::exchange(pending, std::nullopt));
    step < warmup ? apply(now) : void(pending = now);
    if ((step + 1) % kEvery == 0) lr *= kGamma;
  }
  if (pending) apply(*pending);
  return owned;
}

template <class O>
void expect_recurrence(const std::string& base, int64_t accumulate, double clip, int64_t warmup) {
  const auto module = make_module<Recorded<O>>();
  TrainerOptions options =
      testing::quiet({.strategy = DelayedUpdate{.base = base, .warmup_steps = warmup, .update_threads = 2},
                      .max_epochs = 2,
                      .accumulate_grad_batches = accumulate,
                      .gradient_clip_val = clip});
  Trainer trainer(options);
  trainer.fit(module, {.train = testing::tiny_loader(48, 4, /*shuffle=*/true)});
  EXPECT_EQ(trainer.state().global_step, 24 / accumulate);
  const auto expected = recurrence<O>(module->batches, accumulate, clip, warmup);
  const auto params = module->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(params[i].equal(expected[i])) << base << ", parameter " << i << ", accumulate " << accumulate;
  }
}

// design.md, numerics, rule 3.
TEST(DelayedUpdateTest, IsTheRecurrenceBitForBit) {
  for (const std::string& base : kBases) {
    for (const int64_t accumulate : {1, 2}) {
      for (const double clip : {0.0, 0.1}) {
        for (const int64_t warmup : {0, 4}) {
          expect_recurrence<optim::AdamW>(base, accumulate, clip, warmup);
          expect_recurrence<optim::SGD>(base, accumulate, clip, warmup);
        }
      }
    }
  }
}

TEST(DelayedUpdateTest, RanksHaveTheSameParametersWhateverTheBase) {
  at::Tensor expected;
  for (const std::string base : {"ddp", "ddp_sharded", "zero_offload"}) {
    run_ranks(2, [&](World& world) {
      const at::Tensor got = train<Net<optim::AdamW>>(world, {.clip = 0.05}, DelayedUpdate{.base = base});
      const at::Tensor of_rank_0 = got.clone();
      world.data().broadcast(of_rank_0, 0).wait();
      EXPECT_TRUE(got.equal(of_rank_0)) << base << ", rank " << world.rank();
      if (world.rank() > 0) return;
      if (!expected.defined()) expected = got;
      EXPECT_TRUE(got.equal(expected)) << base;
    });
  }
}

// lambda/2 x^2 by SGD: the synchronous one converges up to lr * lambda = 2, the late one up to 1.
struct Quadratic : Module {
  at::Tensor x = register_parameter("x", torch::ones({1}));
  double lr;
  explicit Quadratic(double its_lr) : lr(its_lr) {}
  at::Tensor training_step(const Batch&, int64_t) override { return x.square().sum() * 0.5; }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = lr}); }
};

double where_it_ends(double lr, const StrategyChoice& choice) {
  const auto module = make_module<Quadratic>(lr);
  TrainerOptions options = testing::quiet({.strategy = choice, .max_steps = 2000});
  Trainer(options).fit(module, {.train = testing::tiny_loader()});
  return module->x.abs().item<double>();
}

TEST(DelayedUpdateTest, ConvergesUpToHalfTheLearningRate) {
  const DelayedUpdate delayed{.base = "single_device"};
  EXPECT_LT(where_it_ends(0.99, delayed), 1e-2);
  EXPECT_GT(where_it_ends(1.01, delayed), 1e2);
  EXPECT_LT(where_it_ends(1.99, "single_device"), 1e-2);
  EXPECT_GT(where_it_ends(2.01, "single_device"), 1e2);
}

// SGD whose updates take their time, or fail.
class Odd final : public optim::ElementWiseOptimizer {
 public:
  Odd(std::vector<at::Tensor> params, std::chrono::milliseconds delay, int64_t fails_at)
      : ElementWiseOptimizer("Odd", {{.params = std::move(params)}}, kLr, 0, {}), delay_(delay), fails_at_(fails_at) {}
  optim::Rule rule(const Group& group, int64_t num_updates) const override {
    std::this_thread::sleep_for(delay_);
    if (num_updates == fails_at_) throw std::runtime_error("the update failed");
    return optim::SGD(params(), {.lr = group.lr}).rule(group, num_updates);
  }

 protected:
  void update_with_torch(const Group&, int64_t, const TensorLists&, const std::optional<at::Tensor>&) override {}

 private:
  std::chrono::milliseconds delay_;
  int64_t fails_at_;
};

template <int64_t kDelay, int64_t kFailsAt = -1>
struct WithOdd : Recorded<optim::SGD> {
  Optimizers configure_optimizers() override { return Odd(parameters(), std::chrono::milliseconds(kDelay), kFailsAt); }
};

TEST(DelayedUpdateTest, ASlowWorkerChangesTheTimeOnly) {
  run_ranks(1, [](World& world) {
    EXPECT_TRUE(train<WithOdd<5>>(world, {}, "delayed_update").equal(train<WithOdd<0>>(world, {}, "delayed_update")));
  });
}

TEST(DelayedUpdateTest, AnUpdateThatFailsEndsTheRun) {
  for (const int64_t world_size : {1, 2}) {
    EXPECT_THROW(run_ranks(world_size,
                           [](World& world) {
                             EXPECT_THAT(message_of<std::exception>([&] {
                                           train<WithOdd<0, 5>>(world, {}, DelayedUpdate{.base = "zero_offload"});
                                         }),
                                         HasSubstr("the update failed"));
                             throw std::runtime_error("over");
                           }),
                 std::runtime_error);
  }
}

// With fp16 a gradient overflows at first, whose update alone is left out.
TEST(DelayedUpdateTest, ASkippedStepSkipsItsOwnUpdate) {
  struct Overflows : Recorded<optim::SGD> {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      const at::Tensor loss = Recorded::training_step(batch, batch_idx);
      return batch_idx == 5 ? loss * std::numeric_limits<float>::infinity() : loss;
    }
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = kLr}); }
  };
  const auto weights_of = [](const std::string& strategy) {
    const auto module = make_module<Overflows>();
    StrategyChoice choice(strategy);
    if (strategy == "delayed_update") choice = DelayedUpdate{.base = "single_device"};
    Trainer trainer(testing::quiet({.strategy = choice, .max_epochs = 1, .precision = "16-mixed"}));
    trainer.fit(module, {.train = testing::tiny_loader(48, 4)});
    EXPECT_EQ(trainer.state().global_step, 9) << strategy;  // of 12: the first loss scales are too large, too
    EXPECT_TRUE(testing::flat_weights(*module).isfinite().all().item<bool>());
    return testing::flat_weights(*module);
  };
  EXPECT_LT((weights_of("delayed_update") - weights_of("single_device")).abs().max().item<double>(), 0.05);
}

template <class M = TinyModule>
std::string why_refused(const StrategyChoice& choice, int64_t devices = 1) {
  return message_of<UsageError>([&] {
    TrainerOptions options = testing::quiet({.strategy = choice});
    options.devices = devices;
    Trainer(options).fit(make_module<M>(), {.train = testing::tiny_loader()});
  });
}

TEST(DelayedUpdateTest, BadInputIsRefused) {
  EXPECT_THAT(why_refused(DelayedUpdate{.warmup_steps = -1}), HasSubstr("warmup_steps"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "dp"}),
              HasSubstr("does not go over 'dp': its replicas read the weights"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "zero_ofload"}), HasSubstr("did you mean 'zero_offload'"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "single_device"}, 2), HasSubstr("strategy.base = 'ddp'"));
}

TEST(DelayedUpdateTest, ManualOptimisationIsRefused) {
  struct Manual : TinyModule {
    Manual() { automatic_optimization = false; }
  };
  EXPECT_THAT(message_of<SetupError>([] {
                Trainer(testing::quiet({.strategy = "delayed_update"}))
                    .fit(make_module<Manual>(), {.train = testing::tiny_loader()});
              }),
              HasSubstr("keeps the gradients of a step apart"));
}

}  // namespace
}  // namespace fulgur
