#include "fulgur/data/files/shard_sampler.h"

#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>

#include "fulgur/base/error.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tensor_dataset.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

// Shard i has the samples 10 * i, ..., 10 * i + 9.
const std::vector<int64_t> kSizes(12, 10);

TEST(ShardSampler, VisitsEverySampleOnceInAnOrderOfSeedAndEpoch) {
  const ShardSampler sampler(kSizes, {.shards_at_once = 5, .seed = 1});
  EXPECT_EQ(sampler.size(), 120);
  const at::Tensor order = sampler.indices(3);
  EXPECT_TRUE(std::get<0>(order.sort()).equal(at::arange(120)));
  EXPECT_TRUE(order.equal(sampler.indices(3)));
  EXPECT_FALSE(order.equal(sampler.indices(4)));
  EXPECT_FALSE(order.equal(ShardSampler(kSizes, {.shards_at_once = 5, .seed = 2}).indices(3)));
}

TEST(ShardSampler, MixesTheSamplesOfAFewShardsAtATime) {
  const at::Tensor order = ShardSampler(kSizes, {.shards_at_once = 3}).indices(0);
  std::set<int64_t> seen;
  for (int64_t window = 0; window < 4; ++window) {
    std::set<int64_t> shards;
    for (int64_t i = 0; i < 30; ++i) shards.insert(order[window * 30 + i].item<int64_t>() / 10);
    EXPECT_EQ(shards.size(), 3u);
    seen.merge(shards);
    EXPECT_TRUE(shards.empty());  // none was seen before
  }
  const at::Tensor first = order.slice(0, 0, 30).div(10, "floor");
  EXPECT_GT(first.slice(0, 1).ne(first.slice(0, 0, -1)).sum().item<int64_t>(), 10);  // mixed, not one after another
}

TEST(ShardSampler, APositionInTheOrderOfAnotherSeedIsRefused) {
  const auto loader = [](uint64_t seed) {
    const auto sampler = std::make_shared<ShardSampler>(kSizes, ShardSamplerOptions{.shards_at_once = 3, .seed = seed});
    auto made = DataLoader::make(TensorDataset::make({{"x", at::arange(120)}}), {.batch_size = 10, .sampler = sampler});
    made->begin_epoch(0);
    return made;
  };
  const auto first = loader(1), same = loader(1), other = loader(2);
  first->next();
  same->go_to(first->position());
  EXPECT_TRUE((*same->next())["x"].equal((*first->next())["x"]));
  EXPECT_EQ(testing::message_of<CheckpointError>([&] { other->go_to(first->position()); }),
            "the checkpoint is in the middle of an epoch over TensorDataset in another order (its hash is another "
            "one); resume with the sampler and the seed that it was written with, or from a checkpoint at the end of "
            "an epoch");
  EXPECT_EQ(other->position().get<int64_t>("samples"), 0) << "the loader stays where it was";
}

TEST(ShardSampler, TakesUnequalAndEmptyShards) {
  const ShardSampler sampler({3, 0, 1}, {.shards_at_once = 100});
  EXPECT_TRUE(std::get<0>(sampler.indices(0).sort()).equal(at::arange(4)));
  EXPECT_EQ(ShardSampler({}).indices(0).numel(), 0);
  EXPECT_THROW(ShardSampler({1}, {.shards_at_once = 0}), UsageError);
}

}  // namespace
}  // namespace fulgur
