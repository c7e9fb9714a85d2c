// An exported program under each strategy: the weights must be, bit for bit, those of the module written by hand in
// C++ that has the same operators. archives/tiny.pt2 is TinyModule in Python.
#include <ATen/ops/linear.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/programs/program.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using testing::Case;
using testing::run_ranks;
using testing::TinyModule;

// The parameters of both are drawn in the order of their registration: hidden and out, each weight and bias.
struct ByHand : TinyModule {
  ByHand() { testing::draw_weights(*this); }
};

template <bool kCheckpoint>
struct Imported : Module {
  nn::Program net{nullptr};
  Imported() {
    net = register_module("net",
                          nn::Program("tests/programs/archives/tiny.pt2", {.checkpoint = kCheckpoint ? "hidden" : ""}));
    testing::draw_weights(*this);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nn::functional::mse_loss(net->forward(batch["x"]), batch["y"]);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

struct Setting {
  std::string name;
  StrategyChoice strategy;
  int64_t world_size = 1;
};

class ImportedProgram : public ::testing::TestWithParam<Setting> {
 protected:
  template <class M>
  static at::Tensor weights(const Case& c) {
    at::Tensor of_rank_0;
    run_ranks(GetParam().world_size, [&](World& world) {
      const at::Tensor mine = testing::train<M>(world, c, GetParam().strategy);
      if (world.rank() == 0) of_rank_0 = mine;
    });
    return of_rank_0;
  }
};

TEST_P(ImportedProgram, TrainsBitForBitAsTheModuleWrittenByHand) {
  for (const Case& c :
       {Case{.name = "plain"}, Case{.name = "accumulating and clipping", .accumulate = 2, .clip = 0.05},
        Case{.name = "bf16-mixed", .precision = "bf16-mixed"}, Case{.name = "bf16-true", .precision = "bf16-true"}}) {
    const at::Tensor expected = weights<ByHand>(c);
    EXPECT_TRUE(weights<Imported<false>>(c).equal(expected)) << c.name;
    EXPECT_TRUE(weights<Imported<true>>(c).equal(expected)) << c.name << ", activations computed again";
  }
}

std::vector<Setting> settings() {
  std::vector<Setting> all{{.name = "single_device", .strategy = "single_device"}};
  for (const int64_t world_size : {1, 2}) {
    const std::string suffix = "_on_" + std::to_string(world_size);
    all.push_back({"ddp" + suffix, "ddp", world_size});
    all.push_back({"ddp_sharded" + suffix, "ddp_sharded", world_size});
    all.push_back({"zero_offload" + suffix, "zero_offload", world_size});
    all.push_back({"delayed_update" + suffix, DelayedUpdate{.warmup_steps = 2}, world_size});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, ImportedProgram, ::testing::ValuesIn(settings()),
                         [](const ::testing::TestParamInfo<Setting>& test) { return test.param.name; });

struct Normed : Module {
  nn::Program net{nullptr};
  Normed() { net = register_module("net", nn::Program("tests/programs/archives/mlp.pt2")); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return net->forward({{"x", batch["x"]}, {"scale", torch::ones({1})}})["logits"].sum();
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

TEST(SyncBatchNormOfAProgram, IsAnErrorThatNamesItsBatchNorms) {
  EXPECT_THAT(
      testing::message_of<UsageError>([] {
        Trainer(testing::quiet({.sync_batchnorm = true})).fit(make_module<Normed>(), {.train = testing::tiny_loader()});
      }),
      ::testing::HasSubstr("sync_batchnorm is true, but net.block.0, net.frozen.0 of "));
}

// The model of archives/mlp.pt2 as someone would write it here: a tied weight, a frozen bias, batch norms of which one
// is in eval mode.
struct Decoder : torch::nn::Module {
  at::Tensor weight, bias;
  explicit Decoder(const at::Tensor& tied)
      : weight(register_parameter("weight", tied)), bias(register_parameter("bias", torch::zeros({4}), false)) {}
};

// at::linear() is what Python's linear() calls. That of torch::nn casts a tied weight once for each of its uses under
// autocast, so that the gradient is rounded in another order.
struct MlpByHand : torch::nn::Module {
  torch::nn::Linear encode{4, 4};
  torch::nn::Sequential block{torch::nn::BatchNorm1d(4), torch::nn::ReLU(), torch::nn::Dropout(0.5)};
  torch::nn::Sequential frozen{torch::nn::BatchNorm1d(4), torch::nn::Dropout(0.5)};
  std::shared_ptr<Decoder> decode;
  MlpByHand() {
    register_module("encode", encode);
    register_module("block", block);
    register_module("frozen", frozen);
    decode = register_module("decode", std::make_shared<Decoder>(encode->weight));
    frozen->eval();  // as at export
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor features = frozen->forward(block->forward(at::linear(x, encode->weight, encode->bias)));
    return at::linear(features, decode->weight, decode->bias) * torch::ones({1});
  }
};

// Ranks that are threads share one generator, so that dropout is off.
struct TrainedMlp : Module {
  virtual at::Tensor logits(const at::Tensor& x) = 0;
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nn::functional::mse_loss(logits(batch["x"]).sum(1, /*keepdim=*/true), batch["y"]);
  }
  void on_train_epoch_start() override {
    const auto parts = named_modules();
    for (const char* dropout : {"net.block.2", "net.frozen.1"}) parts[dropout]->eval();
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

struct TrainedMlpByHand : TrainedMlp {
  std::shared_ptr<MlpByHand> net;
  TrainedMlpByHand() {
    net = register_module("net", std::make_shared<MlpByHand>());
    testing::draw_weights(*this);
  }
  at::Tensor logits(const at::Tensor& x) override { return net->forward(x); }
};

struct TrainedMlpOfPython : TrainedMlp {
  nn::Program net{nullptr};
  TrainedMlpOfPython() {
    net = register_module("net", nn::Program("tests/programs/archives/mlp.pt2"));
    testing::draw_weights(*this);
  }
  at::Tensor logits(const at::Tensor& x) override {
    return net->forward({{"x", x}, {"scale", torch::ones({1})}})["logits"];
  }
};

// Every parameter and buffer after three epochs, on the first rank, by name.
template <class M>
std::vector<std::pair<std::string, at::Tensor>> trained_state(const Setting& setting, const std::string& precision) {
  std::vector<std::pair<std::string, at::Tensor>> state;
  run_ranks(setting.world_size, [&](World& world) {
    const auto module = make_module<M>();
    Trainer(testing::quiet({.strategy = setting.strategy,
                            .devices = world.world_size(),
                            .max_epochs = 3,
                            .precision = precision,
                            .accumulate_grad_batches = 2,
                            .gradient_clip_val = 0.05}))
        .fit(module, {.train = testing::tiny_loader(48, 4)});
    if (world.rank() != 0) return;
    for (const auto& item : module->named_parameters()) state.emplace_back(item.key(), item.value().detach());
    for (const auto& item : module->named_buffers()) state.emplace_back(item.key(), item.value());
  });
  return state;
}

TEST_P(ImportedProgram, TrainsTiedWeightsAndBatchNormsAsTheModuleWrittenByHand) {
  // Autocast's cache of casts is one for all threads of a process: ranks that are threads empty each other's.
  std::vector<std::string> precisions{"32"};
  if (GetParam().world_size == 1) precisions.emplace_back("bf16-mixed");
  for (const std::string& precision : precisions) {
    const auto expected = trained_state<TrainedMlpByHand>(GetParam(), precision);
    const auto found = trained_state<TrainedMlpOfPython>(GetParam(), precision);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].first, expected[i].first);
      EXPECT_TRUE(found[i].second.equal(expected[i].second)) << found[i].first << ", " << precision;
    }
  }
}

// dp makes a replica of the module, and so of the program, for each device.
TEST(ImportedProgramUnderDp, TrainsAsTheModuleWrittenByHand) {
  const auto weights = [](const auto& module) {
    Trainer(testing::quiet({.strategy = "dp", .devices = 2, .max_epochs = 3}))
        .fit(module, {.train = testing::tiny_loader(48, 8)});
    return testing::flat_weights(*module);
  };
  EXPECT_TRUE(weights(make_module<Imported<false>>()).equal(weights(make_module<ByHand>())));
}

}  // namespace
}  // namespace fulgur
