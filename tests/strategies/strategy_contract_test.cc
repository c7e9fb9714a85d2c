// What every strategy must do, by name and number of devices; delayed_update, which trains differently, is tested
// before its updates are delayed. A new strategy is added to the list at the end and nowhere else.
// tests/trainer/ranks_test.cc tests what ranks add.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fulgur/optim/adam.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using testing::run_ranks;
using testing::TinyModule;

struct Contract {
  std::string strategy;
  int64_t devices = 1;
  int64_t shard_group = 0;  // number of ranks; 0: all
  bool is_over_gloo = false;
};

StrategyChoice choice_of(const Contract& contract) {
  const std::string shard_group = contract.shard_group == 0 ? "all" : std::to_string(contract.shard_group);
  if (contract.strategy == "delayed_update") {
    return DelayedUpdate{.warmup_steps = 1'000'000, .shard_group = shard_group};
  }
  if (contract.shard_group == 0) return contract.strategy;
  if (contract.strategy == "zero_offload") return ZeroOffload{.shard_group = shard_group};
  return DdpSharded{.shard_group = shard_group};
}

class StrategyContract : public ::testing::TestWithParam<Contract> {
 protected:
  int64_t world_size() const { return is_one_process() ? 1 : GetParam().devices; }
  TrainerOptions options(int64_t max_epochs) const {
    return testing::quiet({.strategy = choice_of(GetParam()), .devices = GetParam().devices, .max_epochs = max_epochs});
  }
  // Runs `body` on each rank with a module of the same weights and a loader of `num_batches` batches of 8 per rank.
  template <class M, class Body>
  void on_ranks(int64_t num_batches, const Body& body) const {
    run_ranks(world_size(), testing::connected(/*shared_memory=*/!GetParam().is_over_gloo), [&](World& world) {
      const auto module = make_module<M>();
      testing::draw_weights(*module);
      body(module, testing::tiny_loader(8 * num_batches * world.world_size(), 8, /*shuffle=*/true), world.rank());
    });
  }

 private:
  bool is_one_process() const { return GetParam().strategy == "single_device" || GetParam().strategy == "dp"; }
};

// A hand-written loop over the same batches with the same kernel: what the strategy must equal, bit for bit. The
// gradients of ranks are added in rank order, first within each group of ranks.
std::vector<double> plain_loop(TinyModule& module, Loader& loader, int64_t epochs, int64_t world_size,
                               int64_t group_size) {
  const auto params = module.parameters();
  std::vector<at::Tensor> exp_avgs, exp_avg_sqs;
  for (const at::Tensor& param : params) {
    exp_avgs.push_back(torch::zeros_like(param));
    exp_avg_sqs.push_back(torch::zeros_like(param));
  }
  std::vector<double> losses;  // as rank 0 saw them
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    std::vector<std::vector<Batch>> batches(static_cast<size_t>(world_size));
    for (int64_t rank = 0; rank < world_size; ++rank) {
      loader.set_shard({.rank = rank, .world_size = world_size});
      loader.begin_epoch(epoch);
      while (const auto batch = loader.next()) batches[static_cast<size_t>(rank)].push_back(*batch);
    }
    for (size_t i = 0; i < batches.front().size(); ++i) {
      std::vector<at::Tensor> sums, of_group;
      for (size_t rank = 0; rank < batches.size(); ++rank) {
        const bool begins_group = rank % static_cast<size_t>(group_size) == 0;
        for (const at::Tensor& param : params) param.mutable_grad().reset();
        const at::Tensor loss = module.loss(batches[rank][i]);
        loss.backward();
        if (rank == 0) losses.push_back(loss.item<double>());
        for (size_t p = 0; p < params.size(); ++p) {
          begins_group ? of_group.push_back(params[p].grad().clone()) : void(of_group[p] += params[p].grad());
        }
        if ((rank + 1) % static_cast<size_t>(group_size) != 0) continue;
        for (size_t p = 0; p < of_group.size() && !sums.empty(); ++p) sums[p] += of_group[p];
        if (sums.empty()) sums = of_group;
        of_group.clear();
      }
      const auto t = static_cast<double>(losses.size());
      const optim::AdamRule adamw{.one_minus_beta1 = 1 - 0.9,
                                  .one_minus_beta2 = 1 - 0.999,
                                  .eps = 1e-8,
                                  .step_size = 1e-2 / (1 - std::pow(0.9, t)),
                                  .inv_root_bias_correction2 = 1 / std::sqrt(1 - std::pow(0.999, t)),
                                  .decay = 1e-2 * 1e-2};
      for (size_t p = 0; p < params.size(); ++p) {
        optim::fused_update(
            adamw,
            optim::Slice<float>{.param = params[p].data_ptr<float>(),
                                .grad = sums[p].data_ptr(),
                                .states = {exp_avgs[p].data_ptr<float>(), exp_avg_sqs[p].data_ptr<float>()},
                                .num_elements = params[p].numel()},
            {.factor = 1.0 / static_cast<double>(world_size)});
      }
    }
  }
  return losses;
}

class StrategyContractInBits : public StrategyContract {};

TEST_P(StrategyContractInBits, EqualsAPlainLoop) {
  constexpr int64_t kEpochs = 20;
  on_ranks<TinyModule>(5, [&](const auto& trained, const auto& loader, int64_t rank) {
    TinyModule expected;
    testing::draw_weights(expected);
    Trainer(options(kEpochs)).fit(trained, {.train = loader});
    const int64_t group_size = GetParam().shard_group > 0 ? GetParam().shard_group : world_size();
    const std::vector<double> losses = plain_loop(expected, *loader, kEpochs, world_size(), group_size);
    for (const auto& param : expected.named_parameters()) {
      EXPECT_TRUE(trained->named_parameters()[param.key()].equal(param.value())) << param.key();
    }
    if (rank > 0) return;
    EXPECT_EQ(trained->train_losses, losses);
    EXPECT_LT(losses.back(), 0.5 * losses.front());  // the model learns
  });
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
  on_ranks<PartlyUsed>(5, [&](const auto& module, const auto& loader, int64_t) {
    const at::Tensor unused = module->unused->weight.detach().clone(), frozen = module->frozen->weight.clone();
    const at::Tensor used = module->hidden->weight.detach().clone();
    Trainer(options(2)).fit(module, {.train = loader});
    EXPECT_TRUE(module->unused->weight.equal(unused));
    EXPECT_TRUE(module->frozen->weight.equal(frozen));
    EXPECT_FALSE(module->hidden->weight.equal(used));
  });
}

// A filter that finds no parameter leaves an empty group.
struct WithAnEmptyGroup : TinyModule {
  Optimizers configure_optimizers() override {
    return optim::AdamW(std::vector<ParamGroup>{{.params = {}}, {.params = parameters()}}, {.lr = 1e-2});
  }
};

TEST_P(StrategyContract, AGroupWithoutParametersChangesNothing) {
  on_ranks<WithAnEmptyGroup>(2, [&](const auto& module, const auto& loader, int64_t) {
    const auto expected = make_module<TinyModule>();
    testing::draw_weights(*expected);
    Trainer(options(2)).fit(expected, {.train = loader});
    Trainer(options(2)).fit(module, {.train = loader});
    EXPECT_TRUE(testing::flat_weights(*module).equal(testing::flat_weights(*expected)));
  });
}

struct SkipsEverySecondBatch : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (batch_idx % 2 == 1) return {};
    return TinyModule::training_step(batch, batch_idx);
  }
};

TEST_P(StrategyContract, AnUndefinedLossSkipsTheBatch) {
  on_ranks<SkipsEverySecondBatch>(5, [&](const auto& module, const auto& loader, int64_t) {
    Trainer trainer(options(1));
    trainer.fit(module, {.train = loader});
    EXPECT_EQ(trainer.state().global_step, 3);
  });
}

struct Tied : TinyModule {
  Tied() { register_module("again", hidden.ptr()); }
};

TEST_P(StrategyContract, NamesEveryTensorOnce) {
  const auto strategy = strategy_registry().create(GetParam().strategy);
  const auto module = make_module<Tied>();
  World alone;
  strategy->setup(*module, {.devices = {c10::kCPU}, .world = alone});
  std::vector<std::string> names;
  for (const auto& [name, tensor] : strategy->module_state()) names.push_back(name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("hidden.weight", "hidden.bias", "out.weight", "out.bias"));
  strategy->teardown();
}

TEST_P(StrategyContract, TeardownIsSafeWithoutSetup) { strategy_registry().create(GetParam().strategy)->teardown(); }

std::vector<Contract> contracts(bool in_bits) {
  std::vector<Contract> all{{"single_device"}};
  for (const std::string name : {"dp", "ddp", "ddp_sharded", "zero_offload", "delayed_update"}) {
    for (const int64_t devices : {1, 2, 3}) {
      const bool adds_parts_of_a_batch = name == "dp" && devices > 1;
      if (!in_bits || !adds_parts_of_a_batch) all.push_back({name, devices});
    }
  }
  for (const std::string name : {"ddp_sharded", "zero_offload", "delayed_update"}) {
    for (const bool is_over_gloo : {false, true}) {
      for (const int64_t devices : {2, 4}) {
        all.push_back({.strategy = name, .devices = devices, .shard_group = 2, .is_over_gloo = is_over_gloo});
      }
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Contract>& test) {
  const Contract& contract = test.param;
  const std::string groups = contract.shard_group > 0 ? "InGroupsOf" + std::to_string(contract.shard_group) : "";
  return contract.strategy + "On" + std::to_string(contract.devices) + groups +
         (contract.is_over_gloo ? "OverGloo" : "");
}

INSTANTIATE_TEST_SUITE_P(, StrategyContract, ::testing::ValuesIn(contracts(/*in_bits=*/false)), name_of);
INSTANTIATE_TEST_SUITE_P(, StrategyContractInBits, ::testing::ValuesIn(contracts(/*in_bits=*/true)), name_of);

TEST(StrategyContractList, CoversEveryBuiltInStrategy) {
  EXPECT_THAT(strategy_registry().names(),
              ::testing::ElementsAre("ddp", "ddp_sharded", "delayed_update", "dp", "single_device", "zero_offload"));
}

}  // namespace
}  // namespace fulgur
