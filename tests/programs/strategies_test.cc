// An exported program under each strategy: the weights must be, bit for bit, those of the module written by hand in
// C++ that has the same operators. archives/tiny.pt2 is TinyModule in Python.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fulgur/programs/program.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
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
