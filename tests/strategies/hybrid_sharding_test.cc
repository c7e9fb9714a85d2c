// Shards within groups of ranks, replicas across groups (shard_group), on ranks that are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/engine/shard_groups.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
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
using testing::run_ranks_on_hosts;
using testing::TinyModule;
using testing::train;

// Numbers whose sum depends on the order in which they are added, the same on every call for a rank.
at::Tensor numbers_of(int64_t rank, int64_t size) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank + 1));
  return torch::randn({size}, generator) * torch::randn({size}, generator).exp();
}

// The sums of groups, in the order of groups; those of a group in the order of ranks.
at::Tensor sum_of_groups(int64_t world_size, int64_t group_size, int64_t size) {
  at::Tensor sum;
  for (int64_t first = 0; first < world_size; first += group_size) {
    at::Tensor of_group = numbers_of(first, size);
    for (int64_t rank = first + 1; rank < first + group_size; ++rank) of_group = of_group + numbers_of(rank, size);
    sum = sum.defined() ? sum + of_group : of_group;
  }
  return sum;
}

TEST(ShardGroupsTest, AddWithinEachGroupAndThenInTheOrderOfGroups) {
  for (const bool shared_memory : {true, false}) {
    for (const auto& [world_size, group_size] : {std::pair<int64_t, int64_t>{4, 2}, {6, 2}, {6, 3}}) {
      run_ranks(world_size, connected(shared_memory), [&](World& world) {
        ShardGroups groups(world, group_size, c10::kCPU, /*rank_order=*/true);
        EXPECT_EQ(groups.data().world_size(), group_size);
        EXPECT_EQ(groups.data().rank(), world.rank() % group_size);
        const int64_t size = 36 * 1024;  // more than a small all_reduce
        const at::Tensor expected = sum_of_groups(world_size, group_size, size);
        const ElementRange mine = groups.grid().shard_of(size);
        const at::Tensor in_place = numbers_of(world.rank(), size), elsewhere = in_place.clone();
        const at::Tensor into = torch::zeros({mine.size()});
        Work first = groups.data().reduce_scatter(in_place);  // two are on their way at once
        Work second = groups.data().reduce_scatter(elsewhere, ReduceOp::sum, into);
        first.wait();
        second.wait();
        EXPECT_TRUE(mine.of(in_place).equal(mine.of(expected)));
        EXPECT_TRUE(into.equal(mine.of(expected)));
        groups.data().all_gather(in_place).wait();
        EXPECT_TRUE(in_place.equal(expected));
      });
    }
  }
}

TEST(ShardGroupsTest, GatherWhatEachRankHasOfItsOwn) {
  for (const int64_t num_shards : {1, 2, 3, 6}) {
    run_ranks(6, [&](World& world) {
      ShardGroups groups(world, num_shards, c10::kCPU, /*rank_order=*/false);
      const at::Tensor flat = torch::zeros({12});
      groups.grid().own_of(12).of(flat).fill_(static_cast<double>(world.rank() + 1));
      const ElementRange own = groups.grid().own_of(12), shard = groups.grid().shard_of(12);
      EXPECT_TRUE(shard.begin <= own.begin && own.end <= shard.end);
      groups.gather_own({flat});
      EXPECT_EQ(flat.sum().item<double>(), 2 * (1 + 2 + 3 + 4 + 5 + 6));  // every rank's two elements, once
    });
  }
}

// Shards change where sums and updates are made. On two hosts ddp adds within each host first, as groups of a host's
// ranks do, whatever connects these.
class EqualsDdpOnHosts : public ::testing::TestWithParam<Case> {
 protected:
  template <class M>
  static at::Tensor weights(int64_t num_hosts, bool shared_memory, const StrategyChoice& strategy) {
    at::Tensor of_rank_0;
    run_ranks_on_hosts(num_hosts, 4 / num_hosts, connected(shared_memory), [&](World& world) {
      const at::Tensor mine = train<M>(world, GetParam(), strategy, /*deterministic=*/true);
      if (world.rank() == 0) of_rank_0 = mine;
    });
    return of_rank_0;
  }
};

TEST_P(EqualsDdpOnHosts, BitForBit) {
  const double mib = GetParam().bucket_mib;
  const at::Tensor expected = weights<Net<optim::AdamW>>(2, true, Ddp{.bucket_cap_mib = mib});
  const std::vector<StrategyChoice> in_groups{
      DdpSharded{.reduce = "at_boundary", .shard_group = "2", .ranks = {.bucket_cap_mib = mib}},
      ZeroOffload{
          .host = {.ratio = 0.5}, .reduce = "at_boundary", .shard_group = "2", .ranks = {.bucket_cap_mib = mib}},
      DelayedUpdate{.base = "ddp_sharded",
                    .warmup_steps = 1'000'000,
                    .reduce = "at_boundary",
                    .shard_group = "2",
                    .ranks = {.bucket_cap_mib = mib}}};
  for (const StrategyChoice& strategy : in_groups) {
    SCOPED_TRACE(strategy.name());
    EXPECT_TRUE((weights<Net<optim::AdamW>>(2, true, strategy).equal(expected)));
    EXPECT_TRUE((weights<Net<optim::AdamW>>(1, true, strategy).equal(expected)));
    EXPECT_TRUE((weights<Net<optim::AdamW>>(1, false, strategy).equal(expected)));
  }
}

INSTANTIATE_TEST_SUITE_P(, EqualsDdpOnHosts,
                         ::testing::Values(Case{.name = "plain"}, Case{.name = "clipped", .clip = 0.05},
                                           Case{.name = "accumulating", .accumulate = 2, .clip = 0.05},
                                           Case{.name = "smallBuckets", .bucket_mib = 0.0001},
                                           Case{.name = "fp16Mixed", .precision = "16-mixed"},
                                           Case{.name = "bf16True", .precision = "bf16-true"}),
                         [](const auto& test) { return test.param.name; });

// The order of additions is another one on one host, where ddp adds all ranks one after another.
TEST(HybridSharding, IsDdpToRoundingOnOneHost) {
  run_ranks(4, [](World& world) {
    const at::Tensor expected = train<Net<optim::SGD>>(world, {}, "ddp");
    const at::Tensor got = train<Net<optim::SGD>>(world, {}, DdpSharded{.shard_group = "2"});
    EXPECT_LT(((got - expected).norm() / expected.norm()).item<double>(), 1e-6);
  });
}

TEST(HybridSharding, EveryRankHasTheSameWeights) {
  for (const StrategyChoice& strategy :
       {StrategyChoice(DdpSharded{.shard_group = "2"}),
        StrategyChoice(DelayedUpdate{.warmup_steps = 2, .shard_group = "2"}),
        StrategyChoice(DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 2, .shard_group = "2"})}) {
    std::vector<at::Tensor> by_rank(4);
    run_ranks(4, [&](World& world) {
      by_rank[static_cast<size_t>(world.rank())] =
          train<Net<optim::AdamW>>(world, {.name = "clipped", .accumulate = 2, .clip = 0.05}, strategy);
    });
    for (const at::Tensor& weights : by_rank) EXPECT_TRUE(weights.equal(by_rank.front())) << strategy.name();
  }
}

TEST(HybridSharding, AGroupOfAHostIsThatOfItsRanks) {
  run_ranks_on_hosts(2, 2, connected(/*shared_memory=*/true), [](World&) {
    const auto weights = [&](const std::string& shard_group) {
      const auto module = make_module<Net<optim::AdamW>>();
      TrainerOptions options = testing::quiet(
          {.strategy = DdpSharded{.shard_group = shard_group}, .devices = 2, .num_nodes = 2, .max_epochs = 2});
      Trainer(options).fit(module, {.train = testing::tiny_loader(64, 4)});
      return testing::flat_weights(*module);
    };
    EXPECT_TRUE(weights("host").equal(weights("2")));
  });
}

TEST(HybridSharding, AHookSeesTheMeanGradientsOfAllRanks) {
  struct Constant : Module {
    at::Tensor weight = register_parameter("weight", torch::zeros({40}));
    at::Tensor seen;
    at::Tensor training_step(const Batch&, int64_t) override {
      return (weight * static_cast<double>(global_rank() + 1)).sum();
    }
    void on_before_optimizer_step(Optimizer&) override { seen = weight.grad().clone(); }
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
  };
  run_ranks(4, [](World&) {
    const auto module = make_module<Constant>();
    Trainer(testing::quiet({.strategy = DdpSharded{.shard_group = "2"}, .devices = 4, .max_steps = 1}))
        .fit(module, {.train = testing::tiny_loader()});
    EXPECT_TRUE(module->seen.equal(torch::full({40}, (1 + 2 + 3 + 4) / 4.0)));
    EXPECT_TRUE(module->weight.equal(torch::full({40}, -(1 + 2 + 3 + 4) / 4.0)));
  });
}

// Groups learn of a failure in another group.
TEST(HybridSharding, ARankThatFailsEndsAllGroups) {
  struct Fails : Net<optim::AdamW> {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (global_rank() == 3 && batch_idx == 1) throw std::runtime_error("rank 3 wants it");
      return Net::training_step(batch, batch_idx);
    }
  };
  std::atomic<int64_t> num_failed = 0;
  const auto fit = [&](World& world) {
    const std::string message =
        message_of<std::exception>([&] { train<Fails>(world, {}, DdpSharded{.shard_group = "2"}); });
    EXPECT_THAT(message, HasSubstr("rank 3"));
    ++num_failed;
  };
  EXPECT_THROW(run_ranks(4, fit), DistributedError);
  EXPECT_EQ(num_failed, 4);
}

std::string why_refused(const StrategyChoice& strategy, int64_t devices, int64_t num_nodes = 1) {
  return message_of<UsageError>(
      [&] { Trainer(testing::quiet({.strategy = strategy, .devices = devices, .num_nodes = num_nodes})); });
}

TEST(HybridSharding, GroupsThatDoNotGoWithTheRanksAreRefusedBeforeAnyRankStarts) {
  EXPECT_THAT(why_refused(DdpSharded{.shard_group = "3"}, 8),
              HasSubstr("strategy.shard_group = 3 does not divide the 8 ranks; possible: all, 2, 4"));
  EXPECT_THAT(why_refused(DdpSharded{.shard_group = "2"}, 5), HasSubstr("does not divide the 5 ranks; possible: all"));
  EXPECT_THAT(why_refused(ZeroOffload{.shard_group = "16"}, 8), HasSubstr("does not divide the 8 ranks"));
  EXPECT_THAT(
      why_refused(DdpSharded{.shard_group = "4"}, 6, 2),
      HasSubstr(
          "shard_group = 4 with 6 ranks on each host: groups would span hosts unevenly; possible: host, all, 2, 3, 6"));
  EXPECT_THAT(why_refused(DdpSharded{.shard_group = "host"}, 1, 4),
              HasSubstr("shard_group = host shards nothing where each of 4 hosts has one rank"));
  EXPECT_THAT(why_refused(DdpSharded{.shard_group = "1"}, 8), HasSubstr("shard_group = 1 shards nothing"));
  for (const std::string text : {"node", "-2", "2.5", "0"}) {
    EXPECT_THAT(why_refused(DdpSharded{.shard_group = text}, 8),
                HasSubstr("strategy.shard_group = '" + text + "' is no group of ranks; write all, host, or a number"));
  }
}

// What --strategy=ddp --strategy.shard_group=2 asks for.
struct DdpInGroups {
  static constexpr std::string_view kName = "ddp";
  std::string shard_group = "2";
  void describe(FieldVisitor& visit) { visit({.name = "shard_group"}, &shard_group); }
};

TEST(HybridSharding, StrategiesThatDoNotShardRefuseGroups) {
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "ddp", .shard_group = "2"}, 4),
              HasSubstr("shard_group = 2 would have no effect with base = 'ddp'; leave it at all"));
  EXPECT_THAT(why_refused(DdpInGroups(), 4),
              HasSubstr("strategy.shard_group = 2 is set, but strategy 'ddp' has no such setting; write strategy = "
                        "'ddp_sharded' (or delayed_update, zero_offload), or leave strategy.shard_group out"));
}

}  // namespace
}  // namespace fulgur
