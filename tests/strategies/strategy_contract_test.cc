// What every strategy must do, by name; delayed_update, which trains otherwise, before its updates are late. A new
// strategy is added to the list at the end and nowhere else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "optim/fused_update.h"
#include "strategies/presets.h"
#include "tests/testing/tiny.h"
#include "trainer/trainer.h"

namespace fulgur {
namespace {

using testing::TinyModule;

StrategyChoice choice_of(const std::string& name) {
  if (name == "delayed_update") return DelayedUpdate{.warmup_steps = 1'000'000};
  return name;
}

class StrategyContract : public ::testing::TestWithParam<std::string> {
 protected:
  TrainerOptions options(int64_t max_epochs) const {
    return testing::quiet({.strategy = choice_of(GetParam()), .max_epochs = max_epochs});
  }
};

// A hand-written loop over the same batches with the same kernel: what the strategy must equal, bit for bit.
std::vector<double> plain_loop(TinyModule& module, Loader& loader, int64_t epochs) {
  const auto params = module.parameters();
  std::vector<at::Tensor> exp_avgs, exp_avg_sqs;
  for (const at::Tensor& param : params) {
    exp_avgs.push_back(torch::zeros_like(param));
    exp_avg_sqs.push_back(torch::zeros_like(param));
  }
  std::vector<double> losses;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    loader.begin_epoch(epoch);
    while (const auto batch = loader.next()) {
      for (const at::Tensor& param : params) param.mutable_grad().reset();
      const at::Tensor loss = module.loss(*batch);
      loss.backward();
      const auto t = static_cast<double>(losses.size() + 1);
      const optim::AdamRule adamw{.one_minus_beta1 = 1 - 0.9,
                                  .one_minus_beta2 = 1 - 0.999,
                                  .eps = 1e-8,
                                  .step_size = 1e-2 / (1 - std::pow(0.9, t)),
                                  .inv_root_bias_correction2 = 1 / std::sqrt(1 - std::pow(0.999, t)),
                                  .decay = 1e-2 * 1e-2};
      for (size_t i = 0; i < params.size(); ++i) {
        optim::fused_update(
            adamw, optim::Slice<float>{.param = params[i].data_ptr<float>(),
                                       .grad = params[i].grad().data_ptr(),
                                       .states = {exp_avgs[i].data_ptr<float>(), exp_avg_sqs[i].data_ptr<float>()},
                                       .num_elements = params[i].numel()});
      }
      losses.push_back(loss.item<double>());
    }
  }
  return losses;
}

TEST_P(StrategyContract, EqualsAPlainLoopBitForBit) {
  constexpr int64_t kEpochs = 20;
  seed_everything(1);
  const auto trained = make_module<TinyModule>();
  seed_everything(1);
  const auto expected = make_module<TinyModule>();
  const auto loader = testing::tiny_loader(40, 8, /*shuffle=*/true);

  Trainer(options(kEpochs)).fit(trained, {.train = loader});
  EXPECT_EQ(trained->train_losses, plain_loop(*expected, *loader, kEpochs));
  for (const auto& param : expected->named_parameters()) {
    EXPECT_TRUE(trained->named_parameters()[param.key()].equal(param.value())) << param.key();
  }
  EXPECT_LT(trained->train_losses.back(), 0.5 * trained->train_losses.front());  // and it learns
}

struct PartlyUsed : TinyModule {
  torch::nn::Linear unused{nullptr}, frozen{nullptr};
  PartlyUsed() {
    unused = register_module("unused", torch::nn::Linear(4, 8));
    frozen = register_module("frozen", torch::nn::Linear(4, 4));
    frozen->weight.set_requires_grad(false);
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return TinyModule::training_step(
        {{"x", torch::nn::functional::linear(batch["x"], frozen->weight)}, {"y", batch["y"]}}, batch_idx);
  }
};

TEST_P(StrategyContract, LeavesUnusedAndFrozenParametersAlone) {
  const auto module = make_module<PartlyUsed>();
  const at::Tensor unused = module->unused->weight.detach().clone(), frozen = module->frozen->weight.clone();
  const at::Tensor used = module->hidden->weight.detach().clone();
  Trainer(options(2)).fit(module, {.train = testing::tiny_loader()});
  EXPECT_TRUE(module->unused->weight.equal(unused));
  EXPECT_TRUE(module->frozen->weight.equal(frozen));
  EXPECT_FALSE(module->hidden->weight.equal(used));
}

struct SkipsEverySecondBatch : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (batch_idx % 2 == 1) return {};
    return TinyModule::training_step(batch, batch_idx);
  }
};

TEST_P(StrategyContract, AnUndefinedLossSkipsTheBatch) {
  Trainer trainer(options(1));
  trainer.fit(make_module<SkipsEverySecondBatch>(), {.train = testing::tiny_loader(40, 8)});
  EXPECT_EQ(trainer.state().global_step, 3);
}

struct Tied : TinyModule {
  Tied() { register_module("again", hidden.ptr()); }
};

TEST_P(StrategyContract, NamesEveryTensorOnce) {
  const auto strategy = strategy_registry().create(GetParam());
  const auto module = make_module<Tied>();
  World alone;
  strategy->setup(*module, {.devices = {c10::kCPU}, .world = alone});
  std::vector<std::string> names;
  for (const auto& [name, tensor] : strategy->module_state()) names.push_back(name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("hidden.weight", "hidden.bias", "out.weight", "out.bias"));
  strategy->teardown();
}

TEST_P(StrategyContract, TeardownIsSafeWithoutSetup) { strategy_registry().create(GetParam())->teardown(); }

INSTANTIATE_TEST_SUITE_P(, StrategyContract,
                         ::testing::Values("single_device", "dp", "ddp", "ddp_sharded", "zero_offload",
                                           "delayed_update"),
                         [](const auto& name) { return name.param; });

TEST(StrategyContractList, CoversEveryBuiltInStrategy) {
  EXPECT_THAT(strategy_registry().names(),
              ::testing::ElementsAre("ddp", "ddp_sharded", "delayed_update", "dp", "single_device", "zero_offload"));
}

}  // namespace
}  // namespace fulgur
