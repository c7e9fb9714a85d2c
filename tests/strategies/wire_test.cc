// Gradients that travel as bf16 (strategy.wire).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/others_have_the_same.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using testing::Case;
using testing::connected;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Net;
using testing::run_ranks;
using testing::TinyModule;
using testing::train;

const RankOptions kBf16{.wire = "bf16"};

constexpr int64_t kSize = 100'000;

at::Tensor gradient_of(int64_t rank) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank + 1));
  return torch::randn({kSize}, generator);
}

// Each rank has a gradient that is known, and one step of SGD leaves the mean of all, negated, in the weight.
struct Known : Module {
  at::Tensor weight = register_parameter("weight", torch::zeros({kSize}));
  at::Tensor training_step(const Batch&, int64_t) override { return (weight * gradient_of(global_rank())).sum(); }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
};

struct Mean {
  at::Tensor got, exact;  // fp64
  at::Tensor largest;     // the mean of the absolute values
};

Mean mean_of_gradients(int64_t world_size, bool shared_memory, const StrategyChoice& strategy) {
  Mean mean{.got = {}, .exact = torch::zeros({kSize}, at::kDouble), .largest = torch::zeros({kSize}, at::kDouble)};
  for (int64_t rank = 0; rank < world_size; ++rank) {
    mean.exact += gradient_of(rank).to(at::kDouble) / static_cast<double>(world_size);
    mean.largest += gradient_of(rank).to(at::kDouble).abs() / static_cast<double>(world_size);
  }
  run_ranks(world_size, connected(shared_memory), [&](World& world) {
    const auto module = make_module<Known>();
    Trainer(testing::quiet({.strategy = strategy, .devices = world_size, .max_steps = 1}))
        .fit(module, {.train = testing::tiny_loader()});
    if (world.rank() == 0) mean.got = -testing::flat_weights(*module);
  });
  return mean;
}

// A rounding to bf16, which has 8 significant bits, is off by at most 2^-8 of the number. Every gradient is rounded
// once. Their sum is rounded once more; with groups of ranks, once within each group and once across them.
TEST(Wire, IsOffByTheRoundingOfGradientsAndOfTheirSum) {
  for (const bool shared_memory : {true, false}) {
    for (const int64_t world_size : {2, 4}) {
      for (const StrategyChoice& strategy : {StrategyChoice(kBf16), StrategyChoice(DdpSharded{.ranks = kBf16}),
                                             StrategyChoice(ZeroOffload{.ranks = kBf16})}) {
        SCOPED_TRACE(strategy.name() + " on " + std::to_string(world_size));
        const Mean mean = mean_of_gradients(world_size, shared_memory, strategy);
        const at::Tensor error = (mean.got - mean.exact).abs();
        EXPECT_TRUE((error <= mean.largest * 1.01 / 128).all().item<bool>());
        const double relative = (error.norm() / mean.exact.norm()).item<double>();
        EXPECT_GT(relative, 1e-3);  // it did travel as bf16
        EXPECT_LT(relative, 3e-3);
        RecordProperty(strategy.name() + std::to_string(world_size), std::to_string(relative));
      }
    }
  }
  const Mean exact = mean_of_gradients(4, true, "ddp");
  EXPECT_LT(((exact.got - exact.exact).norm() / exact.exact.norm()).item<double>(), 1e-6);
}

// Both round the same numbers in the same places.
TEST(Wire, DdpAndDdpShardedAgreeBitForBit) {
  for (const bool shared_memory : {true, false}) {
    for (const int64_t world_size : {2, 3, 4}) {
      for (const Case& c :
           {Case{.name = "plain"}, Case{.name = "accumulating", .accumulate = 2, .clip = 0.05},
            Case{.name = "smallBuckets", .bucket_mib = 0.0001}, Case{.name = "bf16Mixed", .precision = "bf16-mixed"}}) {
        SCOPED_TRACE(c.name + " on " + std::to_string(world_size));
        const RankOptions ranks{.bucket_cap_mib = c.bucket_mib, .wire = "bf16"};
        run_ranks(world_size, connected(shared_memory), [&](World& world) {
          const bool deterministic = world_size > 2;
          const at::Tensor expected = train<Net<optim::AdamW>>(world, c, ranks, deterministic);
          const DdpSharded sharded{.reduce = "at_boundary", .ranks = ranks};
          EXPECT_TRUE((train<Net<optim::AdamW>>(world, c, sharded, deterministic).equal(expected)));
          EXPECT_FALSE((train<Net<optim::AdamW>>(world, c, "ddp", deterministic).equal(expected)));
        });
      }
    }
  }
}

TEST(Wire, EveryRankHasTheSameWeights) {
  for (const StrategyChoice& strategy :
       {StrategyChoice(kBf16), StrategyChoice(DdpSharded{.shard_group = "2", .ranks = kBf16}),
        StrategyChoice(DelayedUpdate{.base = "ddp", .warmup_steps = 2, .ranks = kBf16})}) {
    std::vector<at::Tensor> by_rank(4);
    run_ranks(4, [&](World& world) {
      by_rank[static_cast<size_t>(world.rank())] =
          train<Net<optim::AdamW>>(world, {.name = "clipped", .accumulate = 2, .clip = 0.05}, strategy);
    });
    for (const at::Tensor& weights : by_rank) EXPECT_TRUE(weights.equal(by_rank.front())) << strategy.name();
  }
}

// Counts the bytes of tensors that are reduced.
struct Counts : testing::OthersHaveTheSame {
  using OthersHaveTheSame::OthersHaveTheSame;
  int64_t reduced = 0;
  Work all_reduce(at::Tensor flat, ReduceOp op) override {
    reduced += static_cast<int64_t>(flat.nbytes());
    return OthersHaveTheSame::all_reduce(flat, op);
  }
  Work reduce_scatter(at::Tensor flat, ReduceOp op, at::Tensor into) override {
    reduced += static_cast<int64_t>(flat.nbytes());
    return OthersHaveTheSame::reduce_scatter(flat, op, into);
  }
};

int64_t bytes_reduced(const StrategyChoice& choice) {
  struct Wide : TinyModule {
    torch::nn::Linear wide = register_module("wide", torch::nn::Linear(4, 4096));
    at::Tensor training_step(const Batch& batch, int64_t) override { return wide->forward(batch["x"]).mean(); }
  };
  const auto data = std::make_shared<Counts>(2);
  World world(data, std::make_shared<testing::OthersHaveTheSame>(2));
  const auto module = make_module<Wide>();
  const auto strategy = choice.make("auto");
  strategy->setup(*module, {.devices = {c10::kCPU}, .world = world});
  strategy->setup_optimizers(module->configure_optimizers());
  const at::Tensor loss = strategy->training_step({{"x", torch::ones({2, 4})}}, 0);
  strategy->zero_grad(0);
  strategy->backward(loss, /*is_last=*/true);
  strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
  strategy->optimizer_step(0, {.micro_batches = 1});
  strategy->teardown();
  return data->reduced;
}

TEST(Wire, Bf16HalvesTheBytesOfGradients) {
  EXPECT_NEAR(static_cast<double>(bytes_reduced(kBf16)) / static_cast<double>(bytes_reduced("ddp")), 0.5, 0.01);
  const DdpSharded sharded{.ranks = kBf16};
  EXPECT_EQ(2 * bytes_reduced(sharded), bytes_reduced("ddp_sharded"));
}

TEST(Wire, IsForFp32Parameters) {
  for (const auto& [precision, dtype] :
       {std::pair("64", "Double"), std::pair("bf16-true", "BFloat16"), std::pair("16-true", "Half")}) {
    for (const StrategyChoice& strategy : {StrategyChoice(kBf16), StrategyChoice(DdpSharded{.ranks = kBf16})}) {
      const std::string message = message_of<UsageError>([&] {
        Trainer(testing::quiet({.strategy = strategy, .precision = precision}))
            .fit(make_module<TinyModule>(), {.train = testing::tiny_loader()});
      });
      EXPECT_THAT(message,
                  HasSubstr("strategy.wire = bf16 is for the gradients of fp32 parameters, but 'out.bias' is " +
                            std::string(dtype) + ", with precision '" + precision + "'"));
    }
  }
}

TEST(Wire, RefusesWhatCannotUseIt) {
  const auto why_refused = [](const StrategyChoice& strategy) {
    return message_of<UsageError>([&] { Trainer(testing::quiet({.strategy = strategy})); });
  };
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "single_device", .ranks = kBf16}), HasSubstr("wire = bf16"));
  EXPECT_THAT(why_refused(Ddp{.wire = "fp8"}), HasSubstr("fp32, bf16"));
}

}  // namespace
}  // namespace fulgur
