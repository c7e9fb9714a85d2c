// ddp_sharded compared with ddp, on ranks that are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/nn/tie_parameter.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/saved_optimizers.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/others_have_the_same.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"
#include "tests/testing/unsized_loader.h"

namespace fulgur {
namespace {

using testing::Case;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Net;
using testing::run_ranks;
using testing::TinyModule;
using testing::train;

template <class M>
void expect_equal_to_ddp(int64_t world_size, const Case& c, const DdpSharded& sharded, bool deterministic = false) {
  run_ranks(world_size, [&](World& world) {
    const at::Tensor expected = train<M>(world, c, Ddp{.bucket_cap_mib = c.bucket_mib}, deterministic);
    const at::Tensor got = train<M>(world, c, sharded, deterministic);
    EXPECT_TRUE(got.equal(expected)) << c.name << ": " << (got - expected).abs().max().item<double>();
  });
}

class EqualsDdp : public ::testing::TestWithParam<Case> {};

// Shards change where sums and updates are made, and no bit of the result.
TEST_P(EqualsDdp, BitForBitOnTwoRanks) {
  const DdpSharded sharded{.reduce = "at_boundary", .ranks = {.bucket_cap_mib = GetParam().bucket_mib}};
  expect_equal_to_ddp<Net<optim::AdamW>>(2, GetParam(), sharded);
  expect_equal_to_ddp<Net<optim::Adam>>(2, GetParam(), sharded);
  expect_equal_to_ddp<Net<optim::SGD>>(2, GetParam(), sharded);
}

TEST_P(EqualsDdp, BitForBitOnMoreRanks) {
  for (const int64_t world_size : {3, 4}) {
    expect_equal_to_ddp<Net<optim::AdamW>>(world_size, GetParam(), {.reduce = "at_boundary"}, /*deterministic=*/true);
  }
}

INSTANTIATE_TEST_SUITE_P(, EqualsDdp,
                         ::testing::Values(Case{.name = "plain"}, Case{.name = "clipped", .clip = 0.05},
                                           Case{.name = "clippedByValue", .clip = 0.01, .clip_algorithm = "value"},
                                           Case{.name = "accumulating2", .accumulate = 2},
                                           Case{.name = "accumulating4", .accumulate = 4, .clip = 0.05},
                                           Case{.name = "smallBuckets", .bucket_mib = 0.0001},
                                           Case{.name = "bf16Mixed", .precision = "bf16-mixed"},
                                           Case{.name = "fp16Mixed", .precision = "16-mixed"},
                                           Case{.name = "bf16True", .precision = "bf16-true"}),
                         [](const auto& test) { return test.param.name; });

// Has more weights than a small all_reduce takes, which adds in the order of ranks over every transport.
struct Wide : TinyModule {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(4, 3000));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(3000, 4));
  Wide() { testing::draw_weights(*this); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor x = down->forward(up->forward(batch["x"]).tanh()) / 3000;
    return TinyModule::training_step({{"x", x}, {"y", batch["y"]}}, batch_idx);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

WorldOptions over_gloo() {
  WorldOptions options{.timeout_s = testing::kRanksTimeoutS, .heartbeat_interval_s = 0.1};
  options.collectives.shared_memory = false;
  return options;
}

TEST(DeterministicTest, DdpOverGlooAddsAsDdpSharded) {
  for (const int64_t world_size : {3, 4}) {
    run_ranks(world_size, over_gloo(), [](World& world) {
      const Case c{.bucket_mib = 0.1};
      const Ddp ddp{.bucket_cap_mib = c.bucket_mib};
      const DdpSharded sharded{.reduce = "at_boundary", .ranks = {.bucket_cap_mib = c.bucket_mib}};
      const at::Tensor expected = train<Wide>(world, c, sharded);
      EXPECT_TRUE(train<Wide>(world, c, ddp, /*deterministic=*/true).equal(expected));
      EXPECT_FALSE(train<Wide>(world, c, ddp, /*deterministic=*/false).equal(expected));
    });
  }
}

TEST(DeterministicTest, DdpAddsAsDdpShardedOnSeveralHosts) {
  for (const auto& [num_hosts, ranks_per_host] : {std::pair<int64_t, int64_t>{2, 2}, {3, 2}, {2, 3}}) {
    WorldOptions options = over_gloo();
    options.collectives.shared_memory = true;
    testing::run_ranks_on_hosts(num_hosts, ranks_per_host, options, [](World& world) {
      const Case c{.bucket_mib = 0.1};
      const Ddp ddp{.bucket_cap_mib = c.bucket_mib};
      const DdpSharded sharded{.reduce = "at_boundary", .ranks = {.bucket_cap_mib = c.bucket_mib}};
      const at::Tensor expected = train<Wide>(world, c, sharded);
      EXPECT_TRUE(train<Wide>(world, c, ddp, /*deterministic=*/true).equal(expected));
      EXPECT_TRUE(train<Wide>(world, c, ddp, /*deterministic=*/false).equal(expected));
    });
  }
}

struct Preset {
  std::string name;
  StrategyChoice strategy;
};

// Through shared memory every reduction adds in the order of ranks.
class OverGloo : public ::testing::TestWithParam<Preset> {
 protected:
  static void expect_the_weights_of_shared_memory(int64_t world_size, const Case& c, bool deterministic) {
    const auto weights = [&](const WorldOptions& options) {
      at::Tensor of_rank_0;
      run_ranks(world_size, options, [&](World& world) {
        const at::Tensor mine = train<Wide>(world, c, GetParam().strategy, deterministic);
        if (world.rank() == 0) of_rank_0 = mine;
      });
      return of_rank_0;
    };
    WorldOptions shared_memory = over_gloo();
    shared_memory.collectives.shared_memory = true;
    EXPECT_TRUE(weights(over_gloo()).equal(weights(shared_memory))) << c.name << ", ranks: " << world_size;
  }
};

TEST_P(OverGloo, TrainsBitForBitAsThroughSharedMemory) {
  for (const Case& c : {Case{.name = "plain"}, Case{.name = "accumulating", .accumulate = 2, .clip = 0.05},
                        Case{.name = "bf16True", .precision = "bf16-true"}}) {
    expect_the_weights_of_shared_memory(2, c, /*deterministic=*/false);
    expect_the_weights_of_shared_memory(3, c, /*deterministic=*/true);
  }
}

INSTANTIATE_TEST_SUITE_P(
    , OverGloo,
    ::testing::Values(Preset{"ddp", Ddp{.bucket_cap_mib = 0.1}},
                      Preset{"ddp_sharded", DdpSharded{.ranks = {.bucket_cap_mib = 0.1}}},
                      Preset{"ddp_sharded_at_boundary",
                             DdpSharded{.reduce = "at_boundary", .ranks = {.bucket_cap_mib = 0.1}}},
                      Preset{"stage_1", DdpSharded{.stage = 1, .ranks = {.bucket_cap_mib = 0.1}}},
                      Preset{"zero_offload", ZeroOffload{.host = {.ratio = 0.5}, .ranks = {.bucket_cap_mib = 0.1}}},
                      Preset{"delayed_update", DelayedUpdate{.warmup_steps = 2}},
                      Preset{"delayed_ddp", DelayedUpdate{.base = "ddp", .warmup_steps = 2}}),
    [](const auto& test) { return test.param.name; });

TEST(DdpShardedTest, EachMicroBatchIsTheSameSumInAnotherOrder) {
  run_ranks(2, [](World& world) {
    const Case c{.name = "each", .accumulate = 4};
    const at::Tensor expected = train<Net<optim::SGD>>(world, c, "ddp");
    const at::Tensor got = train<Net<optim::SGD>>(world, c, DdpSharded{});
    EXPECT_LT(((got - expected).norm() / expected.norm()).item<double>(), 1e-6);
  });
}

thread_local int64_t t_rank = 0;

struct LeavesOneOut : Net<optim::SGD> {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor loss = Net::training_step(batch, batch_idx);
    return t_rank == 1 && batch_idx == 1 ? at::Tensor() : loss;
  }
};

// One rank has no gradients for a batch; the other has so many buckets of gradients that it waits for the first ones.
TEST(DdpShardedTest, ARankWithoutALossDoesNotKeepOthersWaiting) {
  for (const int64_t accumulate : {1, 2}) {
    const Case c{.name = "leaves", .accumulate = accumulate, .bucket_mib = 0.0001};
    const DdpSharded sharded{.reduce = "at_boundary", .ranks = {.bucket_cap_mib = c.bucket_mib}};
    run_ranks(2, [&](World& world) {
      t_rank = world.rank();
      const at::Tensor expected = train<LeavesOneOut>(world, c, Ddp{.bucket_cap_mib = c.bucket_mib});
      EXPECT_TRUE(train<LeavesOneOut>(world, c, sharded).equal(expected)) << accumulate;
    });
  }
}

struct Tied : TinyModule {
  torch::nn::Linear again{4, 8};
  Tied() {
    register_module("again", again);
    testing::draw_weights(*this);
    tie_parameter(*again, "weight", again->weight, hidden->weight);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = out->forward(hidden->forward(batch["x"]).tanh() + again->forward(batch["x"]));
    return torch::nn::functional::mse_loss(value, batch["y"]);
  }
};

struct AddsAGroup : TinyModule {
  AddsAGroup() { testing::draw_weights(*this); }
  Optimizers configure_optimizers() override { return optim::AdamW(out->parameters(), {.lr = 1e-2}); }
  void optimizer_step(Optimizer& optimizer, const std::function<void()>& step) override {
    optimizer_ = &optimizer;
    step();
  }
  void on_train_epoch_start() override {
    if (current_epoch() == 1) optimizer_->add_param_group({.params = hidden->parameters(), .lr = 1e-3});
  }
  Optimizer* optimizer_ = nullptr;
};

TEST(DdpShardedTest, TiedWeightsAndGroupsAddedLaterTrainAsWithDdp) {
  expect_equal_to_ddp<Tied>(2, {.name = "tied"}, {});
  expect_equal_to_ddp<AddsAGroup>(2, {.name = "added"}, {});
}

// Gradients of four micro-batches. In bf16 256 + 1 is 256, so the sum would be 258, and 516 over two ranks.
constexpr std::array kGradients{256.0, 1.0, 1.0, 2.0};
constexpr double kSum = 256 + 1 + 1 + 2;

struct Counts : Module {
  at::Tensor weight = register_parameter("weight", torch::zeros({40}));
  at::Tensor training_step(const Batch&, int64_t batch_idx) override {
    return (weight * kGradients.at(static_cast<size_t>(batch_idx))).sum();
  }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
};

TEST(DdpShardedTest, GradientsOf16BitsAddUpIn32) {
  const at::Tensor expected = torch::full({40}, -kSum / 4, at::kDouble);
  ASSERT_TRUE(expected.to(at::kBFloat16).to(at::kDouble).equal(expected));
  ASSERT_FALSE(torch::full({40}, -258.0 / 4, at::kDouble).to(at::kBFloat16).to(at::kDouble).equal(expected));
  const std::vector<StrategyChoice> strategies{"ddp", "ddp_sharded", "zero_offload", DelayedUpdate{.warmup_steps = 0}};
  for (const StrategyChoice& strategy : strategies) {
    run_ranks(2, [&](World&) {
      const auto module = make_module<Counts>();
      const auto loader = DataLoader::make(testing::tiny_dataset(48), {.batch_size = 4});
      Trainer(testing::quiet({.strategy = strategy,
                              .devices = 2,
                              .max_steps = 1,
                              .precision = "bf16-true",
                              .accumulate_grad_batches = 4}))
          .fit(module, {.train = loader});
      EXPECT_TRUE(testing::flat_weights(*module).equal(expected)) << strategy.name() << module->weight[0];
    });
  }
}

struct CountsManually : Counts {
  CountsManually() { automatic_optimization = false; }
  at::Tensor training_step(const Batch&, int64_t) override {
    ManualOptimizer opt = optimizer();
    opt.zero_grad();
    for (int64_t i = 0; i < 4; ++i) manual_backward(Counts::training_step({}, i));
    opt.step();
    return {};
  }
};

TEST(DdpTest, GradientsOf16BitsAddUpIn32InManualOptimisation) {
  const at::Tensor expected = torch::full({40}, -kSum, at::kDouble);
  for (const int64_t world_size : {1, 2}) {
    run_ranks(world_size, [&](World&) {
      const auto module = make_module<CountsManually>();
      Trainer(testing::quiet({.strategy = "ddp", .devices = world_size, .max_steps = 1, .precision = "bf16-true"}))
          .fit(module, {.train = testing::tiny_loader()});
      EXPECT_TRUE(testing::flat_weights(*module).equal(expected)) << world_size << module->weight[0];
    });
  }
}

// A module with a bf16 parameter that is frozen at first.
struct ThawsIn16Bits : Module {
  at::Tensor single = register_parameter("single", torch::zeros({8}));
  at::Tensor half = register_parameter("half", torch::zeros({8}, at::kBFloat16));
  ThawsIn16Bits() { half.set_requires_grad(false); }
  void on_train_epoch_start() override { half.set_requires_grad(current_epoch() == 1); }
  at::Tensor training_step(const Batch&, int64_t batch_idx) override {
    return single.sum() + (half * kGradients.at(static_cast<size_t>(batch_idx))).sum().to(at::kFloat);
  }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
};

TEST(SingleDeviceTest, GradientsOf16BitsThatComeLaterAddUpIn32) {
  const auto module = make_module<ThawsIn16Bits>();
  Trainer(testing::quiet({.strategy = "single_device", .max_epochs = 2, .accumulate_grad_batches = 4}))
      .fit(module, {.train = testing::tiny_loader(16, 4)});
  EXPECT_TRUE(module->half.equal(torch::full({8}, -kSum / 4, at::kBFloat16))) << module->half[0];
}

TEST(SingleDeviceTest, SaysThatAnOptimizerKeepsNoMastersOf16Bits) {
  struct Lamb : TinyModule {
    Optimizers configure_optimizers() override { return optim::LAMB(parameters(), {.lr = 0.1}); }
  };
  const auto said = [](const auto& train_it) {
    ::testing::internal::CaptureStderr();
    run_ranks(1, train_it);
    return ::testing::internal::GetCapturedStderr();
  };
  const Case bf16{.precision = "bf16-true"};
  const auto warning = HasSubstr("LAMB keeps no fp32 masters of 16-bit parameters");
  EXPECT_THAT(said([&](World& world) { train<Lamb>(world, bf16, "single_device"); }), warning);
  EXPECT_THAT(said([&](World& world) { train<Lamb>(world, {}, "single_device"); }), ::testing::Not(warning));
  EXPECT_THAT(said([&](World& world) { train<TinyModule>(world, bf16, "single_device"); }),
              ::testing::Not(HasSubstr("masters")));
}

TEST(DdpShardedTest, SaysThatOneRankSavesNoMemory) {
  ::testing::internal::CaptureStderr();
  run_ranks(1, [](World& world) { train<TinyModule>(world, {}, "ddp_sharded"); });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("ddp_sharded with one rank saves no memory"));
}

// Only rank 0 has a gradient in the first bucket: rank 1 sends nothing before it waits for rank 0 in the backward of
// `norm`, which rank 0 reaches after more buckets than the pool has.
TEST(DdpShardedTest, ALayerThatWaitsForOtherRanksInBackwardIsNotKeptWaiting) {
  struct Synced : TinyModule {
    torch::nn::Linear stem{nullptr};
    nn::SyncBatchNorm1d norm{nullptr};
    torch::nn::Sequential layers;
    at::Tensor sometimes;
    Synced() {
      stem = register_module("stem", torch::nn::Linear(4, 4));
      norm = register_module("norm", nn::SyncBatchNorm1d(4));
      for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(4, 4));
      register_module("layers", layers);
      sometimes = register_parameter("sometimes", torch::ones({4}));
      testing::draw_weights(*this);
    }
    at::Tensor training_step(const Batch& batch, int64_t) override {
      const at::Tensor loss = layers->forward(norm->forward(stem->forward(batch["x"]))).square().mean();
      return t_rank == 0 ? loss + sometimes.square().sum() : loss;
    }
  };
  const Case c{.name = "synced", .bucket_mib = 0.00001};
  run_ranks(2, [&](World& world) {
    t_rank = world.rank();
    const at::Tensor expected = train<Synced>(world, c, Ddp{.bucket_cap_mib = c.bucket_mib});
    EXPECT_TRUE(train<Synced>(world, c, DdpSharded{.ranks = {.bucket_cap_mib = c.bucket_mib}}).equal(expected));
  });
}

TEST(DdpShardedTest, StageOneShardsTheStateAlone) {
  for (const Case& c : {Case{.name = "plain"}, Case{.name = "accumulating", .accumulate = 2, .clip = 0.05}}) {
    expect_equal_to_ddp<Net<optim::AdamW>>(2, c, {.stage = 1});
  }
}

TEST(DdpShardedTest, MoreRanksThanElementsOfABucketWork) {
  struct Scalar : Module {
    at::Tensor weight = register_parameter("weight", torch::ones({1}));
    at::Tensor training_step(const Batch& batch, int64_t) override { return (weight * batch["x"]).square().mean(); }
    Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 0.1}); }
  };
  run_ranks(3, [](World& world) {
    const Case c{.name = "one element"};
    EXPECT_TRUE(train<Scalar>(world, c, "ddp_sharded").equal(train<Scalar>(world, c, "ddp")));
  });
}

TEST(DdpShardedTest, AHookChangesTheMeanGradients) {
  struct Halves : Net<optim::SGD> {
    void on_before_optimizer_step(Optimizer& optimizer) override {
      scale_gradients(optimizer.params(), torch::tensor(0.5, torch::kDouble));
    }
  };
  run_ranks(2, [](World& world) {
    const Case c{.name = "halved", .accumulate = 2};
    EXPECT_TRUE(train<Halves>(world, c, DdpSharded{.reduce = "at_boundary"}).equal(train<Halves>(world, c, "ddp")));
  });
}

TEST(DdpShardedTest, AGradientThatAHookDropsDoesNotCountInTheNorm) {
  struct Drops : Net<optim::SGD> {
    void on_before_optimizer_step(Optimizer& optimizer) override { optimizer.params().back().mutable_grad().reset(); }
  };
  run_ranks(2, [](World& world) {
    const Case c{.name = "dropped", .clip = 0.05};
    const at::Tensor expected = train<Drops>(world, c, "ddp");
    EXPECT_TRUE(train<Drops>(world, c, "ddp_sharded").equal(expected));
    EXPECT_FALSE(train<Net<optim::SGD>>(world, c, "ddp_sharded").equal(expected));
  });
}

// The gradient is (rank + 1) * (batch_idx + 1) for each of 40 elements. Two ranks take two steps of two micro-batches,
// in which its means are 1.5 * 1.5 and 1.5 * 3.5.
TEST(StrategiesWithRanks, AHookSeesAndChangesTheMeanGradients) {
  struct Halves : Module {
    at::Tensor weight = register_parameter("weight", torch::zeros({40}));
    std::vector<double> norms;
    at::Tensor training_step(const Batch&, int64_t batch_idx) override {
      return (weight * static_cast<double>((global_rank() + 1) * (batch_idx + 1))).sum();
    }
    void on_before_optimizer_step(Optimizer& optimizer) override {
      norms.push_back(gradient_norm(optimizer.params()).item<double>());
      scale_gradients(optimizer.params(), torch::tensor(0.5, torch::kDouble));
    }
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
  };
  for (const StrategyChoice& strategy :
       {StrategyChoice("ddp"), StrategyChoice(DdpSharded{.reduce = "at_boundary"}), StrategyChoice("ddp_sharded"),
        StrategyChoice("zero_offload"), StrategyChoice(ZeroOffload{.host = {.ratio = 0.5}})}) {
    SCOPED_TRACE(strategy.name());
    run_ranks(2, [&](World&) {
      const auto module = make_module<Halves>();
      Trainer(testing::quiet({.strategy = strategy, .devices = 2, .accumulate_grad_batches = 2}))
          .fit(module, {.train = testing::tiny_loader(4 * 2 * 4, 4)});
      EXPECT_THAT(module->norms, ElementsAre(DoubleNear(1.5 * 1.5 * std::sqrt(40), 1e-5),
                                             DoubleNear(1.5 * 3.5 * std::sqrt(40), 1e-5)));
      EXPECT_TRUE(module->weight.equal(torch::full({40}, -0.5 * 1.5 * (1.5 + 3.5))));
    });
  }
}

TEST(DdpShardedTest, AnOptimizerThatNeedsWholeTensorsIsRefused) {
  struct Lamb : TinyModule {
    Optimizers configure_optimizers() override { return optim::LAMB(parameters(), {.lr = 0.1}); }
  };
  EXPECT_THROW(
      run_ranks(2,
                [](World& world) {
                  const Case c{.name = "lamb"};
                  EXPECT_THAT(
                      message_of<UsageError>([&] { train<Lamb>(world, c, "ddp_sharded"); }),
                      HasSubstr("LAMB needs whole tensors, but here they are updated in parts; use an optimizer that"));
                }),
      DistributedError);
}

TEST(DdpShardedTest, ManualOptimisationIsRefused) {
  struct Manual : TinyModule {
    Manual() { automatic_optimization = false; }
  };
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           const Case c{.name = "manual"};
                           EXPECT_THAT(message_of<SetupError>([&] { train<Manual>(world, c, "ddp_sharded"); }),
                                       HasSubstr("use 'ddp'"));
                         }),
               DistributedError);
}

// Also refused where gradients lie at the parameters: gradients not summed over ranks would make the parameters differ.
template <class M>
void expect_refused_on_two_ranks(const Case& c) {
  for (const std::string strategy : {"ddp", "ddp_sharded", "zero_offload"}) {
    EXPECT_THROW(run_ranks(2,
                           [&](World& world) {
                             EXPECT_THAT(message_of<c10::Error>([&] { train<M>(world, c, strategy); }),
                                         HasSubstr("was unfrozen or added in the middle of a step"))
                                 << strategy;
                           }),
                 DistributedError)
        << strategy;
  }
}

TEST(ParametersThatChange, BetweenTheMicroBatchesOfAStepAreRefused) {
  struct Thaws : Net<optim::SGD> {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (batch_idx == 1) thawing->weight.set_requires_grad(true);
      return Net::training_step(batch, batch_idx);
    }
  };
  struct AddsBefore : AddsAGroup {
    void on_train_epoch_start() override {}
    BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
      if (current_epoch() == 1 && batch_idx == 1) optimizer_->add_param_group({.params = hidden->parameters()});
      return BatchAction::run;
    }
  };
  expect_refused_on_two_ranks<Thaws>({.accumulate = 2});
  expect_refused_on_two_ranks<AddsBefore>({.accumulate = 2});
}

TEST(ParametersThatChange, JustBeforeTheUpdateAreRefused) {
  struct AddsInHook : AddsAGroup {
    void on_train_epoch_start() override {}
    void on_before_optimizer_step(Optimizer& optimizer) override {
      if (global_step() == 2) optimizer.add_param_group({.params = hidden->parameters()});
    }
  };
  expect_refused_on_two_ranks<AddsInHook>({});
}

// In manual optimisation a parameter that no optimizer had in the backward keeps the gradient of its own rank.
TEST(ParametersThatChange, WithAGradientOfTheirOwnAreRefusedInManualOptimisation) {
  struct AddsBetween : AddsAGroup {
    AddsBetween() { automatic_optimization = false; }
    void on_train_epoch_start() override {}
    void on_before_optimizer_step(Optimizer& optimizer) override { optimizer_ = &optimizer; }
    at::Tensor training_step(const Batch& batch, int64_t) override {
      ManualOptimizer opt = optimizer();
      opt.zero_grad();
      manual_backward(loss(batch));
      if (optimizer_ != nullptr) optimizer_->add_param_group({.params = hidden->parameters()});
      opt.step();
      return {};
    }
  };
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           EXPECT_THAT(message_of<c10::Error>([&] { train<AddsBetween>(world, {}, "ddp"); }),
                                       HasSubstr("parameter 'hidden.weight' was added to an optimizer after it had got "
                                                 "a gradient"));
                         }),
               DistributedError);
}

// One rank has no loss at the start of an accumulation window, and must not fetch its next batch meanwhile.
TEST(ParametersThatChange, AtTheStartOfAWindowReachEveryRankWithTheSameBatch) {
  struct FreezesLater : TinyModule {
    FreezesLater() { testing::draw_weights(*this); }
    BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
      if (batch_idx == 2) hidden->weight.set_requires_grad(false);
      return BatchAction::run;
    }
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      return t_rank == 1 && batch_idx == 2 ? at::Tensor() : TinyModule::training_step(batch, batch_idx);
    }
  };
  for (const std::string strategy : {"ddp", "ddp_sharded"}) {
    run_ranks(2, [&](World& world) {
      t_rank = world.rank();
      Trainer trainer(testing::quiet({.strategy = strategy, .devices = 2, .accumulate_grad_batches = 2}));
      trainer.fit(make_module<FreezesLater>(),
                  {.train = std::make_shared<testing::UnsizedLoader>(testing::tiny_loader(16, 4))});
      EXPECT_EQ(trainer.state().global_step, 2) << strategy;
    });
  }
}

// Gets a layer in the second epoch, whose values differ between ranks.
struct Grows : AddsAGroup {
  torch::nn::Linear grown{nullptr};
  virtual torch::nn::Linear make_layer() const { return torch::nn::Linear(4, 4); }
  void on_train_epoch_start() override {
    if (current_epoch() != 1) return;
    grown = register_module("grown", make_layer());
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& param : grown->parameters()) at::Tensor(param).fill_(0.1 * static_cast<double>(t_rank + 1));
    grown->register_buffer("buffer", torch::full({3}, static_cast<double>(t_rank + 1)));
    optimizer_->add_param_group({.params = grown->parameters()});
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (!grown) return AddsAGroup::training_step(batch, batch_idx);
    return AddsAGroup::training_step({{"x", grown->forward(batch["x"])}, {"y", batch["y"]}}, batch_idx);
  }
};

TEST(ParametersThatChange, ThoseOfANewLayerAreThoseOfRank0) {
  for (const std::string strategy : {"ddp", "ddp_sharded", "zero_offload"}) {
    std::vector<at::Tensor> by_rank(2);
    run_ranks(2, [&](World& world) {
      t_rank = world.rank();
      const auto module = make_module<Grows>();
      Trainer(testing::quiet({.strategy = strategy, .devices = 2, .max_epochs = 2}))
          .fit(module, {.train = testing::tiny_loader(16, 4)});
      EXPECT_TRUE(module->grown->buffers()[0].equal(torch::ones({3}))) << strategy;
      by_rank[static_cast<size_t>(world.rank())] = testing::flat_weights(*module);
    });
    EXPECT_TRUE(by_rank[0].equal(by_rank[1])) << strategy;
  }
}

TEST(ParametersThatChange, ANewLayerThatDoesNotFitIsRefused) {
  struct GrowsUnequally : Grows {
    torch::nn::Linear make_layer() const override {
      return torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(t_rank == 0));
    }
  };
  struct GrowsIn64Bits : Grows {
    torch::nn::Linear make_layer() const override {
      torch::nn::Linear layer(4, 4);
      layer->to(at::kDouble);
      return layer;
    }
  };
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           t_rank = world.rank();
                           EXPECT_THAT(message_of<SetupError>([&] { train<GrowsUnequally>(world, {}, "ddp"); }),
                                       HasSubstr("rank 0 has 'grown.bias' of shape [4] and dtype Float"));
                         }),
               DistributedError);
  run_ranks(1, [](World& world) {
    EXPECT_THAT(
        message_of<SetupError>([&] { train<GrowsIn64Bits>(world, {.precision = "bf16-true"}, "single_device"); }),
        HasSubstr("'grown.weight' was registered after the strategy had set the module up, as Double on cpu, but the "
                  "module is trained as BFloat16 on cpu"));
  });
}

// The last bit of a norm depends on the number of threads, which may differ between ranks.
TEST(DdpTest, ClipsByTheNormOfRank0) {
  struct NormOfRank0 : testing::OthersHaveTheSame {
    using OthersHaveTheSame::OthersHaveTheSame;
    Work broadcast(at::Tensor flat, int64_t root) override {
      if (root == 0 && flat.scalar_type() == at::kDouble && flat.numel() == 1) flat.fill_(2.0);
      return {};
    }
  };
  struct One : Module {
    at::Tensor weight = register_parameter("weight", torch::zeros({1}));
    at::Tensor training_step(const Batch&, int64_t) override { return weight.sum(); }
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
  };
  const auto group = std::make_shared<NormOfRank0>(2);
  World world(group, group);
  const auto module = make_module<One>();
  const auto strategy = StrategyChoice("ddp").make("auto");
  strategy->setup(*module, {.devices = {c10::kCPU}, .world = world});
  strategy->setup_optimizers(module->configure_optimizers());
  const at::Tensor loss = strategy->training_step({}, 0);
  strategy->zero_grad(0);
  strategy->backward(loss, /*is_last=*/true);
  strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
  strategy->optimizer_step(0, {.micro_batches = 1, .clipping = {.value = 1.0}});
  EXPECT_NEAR(module->weight.item<double>(), -0.5, 1e-6);
  strategy->teardown();
}

TEST(PiecesIn, CoverEveryElementOnceForAnyNumberOfRanks) {
  Net<optim::SGD> net;
  const Optimizers optimizers = net.configure_optimizers();
  for (const int64_t world_size : {1, 2, 3, 4, 7, 16}) {
    const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 100, .world_size = world_size});
    for (const auto& bucket : flat.buckets()) {
      std::vector<at::Tensor> counts;
      for (const auto& slot : bucket.slots) counts.push_back(torch::zeros({slot.num_elements}, at::kLong));
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const ElementRange range = rank_range(bucket.flat.numel(), rank, world_size);
        for (const Piece& piece : pieces_in(bucket, range)) {
          counts[piece.slot].narrow(0, piece.begin, piece.num_elements) += 1;
          EXPECT_EQ(bucket.slots[piece.slot].begin + piece.begin, range.begin + piece.offset);
        }
      }
      for (const at::Tensor& count : counts) EXPECT_TRUE(count.eq(1).all().item<bool>());
    }
  }
}

// What the ranks write of their shards, as a checkpoint has it.
class Saved {
 public:
  void add(const FlatParameters& flat, const OptimizerShard& shard, int64_t rank, int64_t world_size) {
    const std::lock_guard lock(mutex_);
    for (size_t b = 0; b < flat.buckets().size(); ++b) {
      const ElementRange mine = rank_range(flat.buckets()[b].flat.numel(), rank, world_size);
      for (StateRange& range : shard.state_ranges(b, mine, /*late=*/{})) add(std::move(range));
      const std::vector<int64_t> counts = shard.num_updates(b);
      for (size_t s = 0; s < counts.size(); ++s) {
        int64_t& count = num_updates_[flat.buckets()[b].slots[s].name];
        count = std::max(count, counts[s]);
      }
    }
  }
  void add(const std::string& name, const ParameterState& whole, int64_t num_elements) {
    add({name, 0, num_elements, part_of(whole, 0, num_elements)});
    num_updates_[name] = whole.num_updates;
  }

  // The state of a whole parameter, in memory order.
  ParameterState of(const std::string& name, int64_t num_elements) const {
    return {.num_updates = num_updates_.at(name), .tensors = read(name, 0, num_elements)};
  }

  void load(const FlatParameters& flat, OptimizerShard& shard) const {
    for (size_t b = 0; b < flat.buckets().size(); ++b) {
      std::vector<int64_t> counts;
      for (const auto& slot : flat.buckets()[b].slots) counts.push_back(num_updates_.at(slot.name));
      shard.load_ranges(b, counts,
                        [this](const std::string& name, int64_t begin, int64_t end) { return read(name, begin, end); },
                        /*late=*/{});
    }
  }

 private:
  void add(StateRange range) {
    for (auto& [name, tensor] : range.tensors) tensor = tensor.clone();
    ranges_.push_back(std::move(range));
  }

  StateTensors read(const std::string& parameter, int64_t begin, int64_t end) const {
    StateTensors found;
    for (const StateRange& range : ranges_) {
      if (range.parameter != parameter) continue;
      const int64_t first = std::max(begin, range.begin), last = std::min(end, range.end);
      if (first >= last) continue;
      for (const auto& [name, tensor] : range.tensors) {
        at::Tensor& whole = found[name];
        if (!whole.defined()) whole = torch::full({end - begin}, std::nan(""), tensor.options());
        whole.narrow(0, first - begin, last - first).copy_(tensor.narrow(0, first - range.begin, last - first));
      }
    }
    return found;
  }

  std::mutex mutex_;
  std::vector<StateRange> ranges_;
  std::map<std::string, int64_t> num_updates_;
};

void step(const TinyModule& net, const Optimizers& optimizers) {
  for (const at::Tensor& param : net.parameters()) param.mutable_grad() = param.detach().cos();
  optimizers[0].step();
}

// State of an optimizer of whole parameters, cut for 2 ranks, put together and loaded into another optimizer of whole
// parameters.
TEST(OptimizerShardTest, StateGoesToOtherStrategiesAndBack) {
  TinyModule net, whole;
  const Optimizers optimizers = net.configure_optimizers(), ours = whole.configure_optimizers();
  for (int i = 0; i < 3; ++i) step(net, optimizers);
  Saved saved, cut;
  for (size_t i = 0; i < net.parameters().size(); ++i) {
    const std::string name = net.named_parameters()[i].key();
    saved.add(name, optimizers[0].parameter_state(/*group=*/0, i), net.parameters()[i].numel());
    at::Tensor(whole.parameters()[i]).set_data(net.parameters()[i].detach().clone());
  }
  run_ranks(2, [&](World& world) {
    TinyModule sharded;
    const Optimizers theirs = sharded.configure_optimizers();
    const FlatParameters flat(sharded, theirs, {.world_size = 2});
    OptimizerShard shard(flat, theirs, {.rank = world.rank(), .world_size = 2});
    saved.load(flat, shard);
    cut.add(flat, shard, world.rank(), 2);
  });
  for (size_t i = 0; i < whole.parameters().size(); ++i) {
    const at::Tensor param = whole.parameters()[i];
    ParameterState state = cut.of(whole.named_parameters()[i].key(), param.numel());
    for (auto& [name, tensor] : state.tensors) tensor = tensor.view(param.sizes());
    ours[0].load_parameter_state(/*group=*/0, i, state);
  }
  step(net, optimizers);
  step(whole, ours);
  for (size_t i = 0; i < whole.parameters().size(); ++i) {
    EXPECT_TRUE(whole.parameters()[i].equal(net.parameters()[i])) << i;
  }
}

// A checkpoint of precision `64` has no masters.
TEST(OptimizerShardTest, TakesTheStateOfAnotherPrecision) {
  TinyModule net;
  net.to(at::kBFloat16);
  const Optimizers optimizers = net.configure_optimizers();
  const FlatParameters flat(net, optimizers);
  OptimizerShard shard(flat, optimizers, {});
  Saved of_64_bits, loaded;
  for (const auto& item : net.named_parameters()) {
    const at::Tensor value = torch::rand(item.value().sizes(), at::kDouble);
    of_64_bits.add(item.key(), {.num_updates = 2, .tensors = {{"exp_avg", value}, {"exp_avg_sq", value}}},
                   value.numel());
  }
  of_64_bits.load(flat, shard);
  loaded.add(flat, shard, 0, 1);
  for (const auto& item : net.named_parameters()) {
    const int64_t size = item.value().numel();
    const ParameterState expected = of_64_bits.of(item.key(), size), got = loaded.of(item.key(), size);
    EXPECT_TRUE(got.tensor("exp_avg").equal(expected.tensor("exp_avg").to(at::kFloat))) << item.key();
    EXPECT_TRUE(got.tensor("master").equal(item.value().detach().to(at::kFloat).flatten())) << item.key();
  }
}

// State of 2 ranks, put together and cut again for 3 ranks, and for one.
TEST(OptimizerShardTest, StateGoesToAnyNumberOfRanks) {
  const auto with_shard = [](World& world, const auto& body) {
    TinyModule net;
    const Optimizers optimizers = net.configure_optimizers();
    const FlatParameters flat(net, optimizers, {.world_size = world.world_size()});
    OptimizerShard shard(flat, optimizers, {.rank = world.rank(), .world_size = world.world_size()});
    body(flat, shard, optimizers[0].groups()[0]);
  };
  Saved saved;
  run_ranks(2, [&](World& world) {
    with_shard(world, [&](const FlatParameters& flat, OptimizerShard& shard, const Optimizer::Group& group) {
      const int64_t size = shard.range(0).size();
      const at::Tensor gradient = torch::arange(size, at::kFloat) + static_cast<double>(world.rank() * size);
      shard.update(0, 0, 0, group, gradient, std::vector<double>(flat.buckets()[0].slots.size(), 2.0), {},
                   /*late=*/nullptr);
      saved.add(flat, shard, world.rank(), 2);
    });
  });
  const ParameterState weight = saved.of("hidden.weight", 32);
  EXPECT_EQ(weight.num_updates, 1);
  const at::Tensor& mean = weight.tensors.at("exp_avg");
  EXPECT_NEAR((mean[1] - mean[0]).item<double>(), 0.1, 1e-4);  // (1 - beta1) * gradient
  for (const int64_t world_size : {1, 3}) {
    Saved again;
    run_ranks(world_size, [&](World& world) {
      with_shard(world, [&](const FlatParameters& flat, OptimizerShard& shard, const Optimizer::Group&) {
        saved.load(flat, shard);
        again.add(flat, shard, world.rank(), world_size);
      });
    });
    for (const auto& item : TinyModule().named_parameters()) {
      const ParameterState expected = saved.of(item.key(), item.value().numel()),
                           got = again.of(item.key(), item.value().numel());
      EXPECT_EQ(got.num_updates, 1);
      for (const auto& [name, tensor] : expected.tensors) {
        EXPECT_TRUE(got.tensors.at(name).equal(tensor)) << item.key() << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace fulgur
