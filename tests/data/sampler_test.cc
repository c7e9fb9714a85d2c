#include "fulgur/data/sampler.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace fulgur {
namespace {

TEST(SequentialSampler, GoesThroughInOrder) {
  EXPECT_TRUE(SequentialSampler(4).indices(7).equal(torch::tensor({0, 1, 2, 3}, torch::kLong)));
}

TEST(RandomSampler, VisitsEverySampleOnce) {
  const auto [sorted, places] = RandomSampler(100, 1).indices(0).sort();
  EXPECT_TRUE(sorted.equal(torch::arange(100)));
}

TEST(RandomSampler, OrderIsAFunctionOfSeedAndEpoch) {
  const RandomSampler sampler(100, 1);
  EXPECT_TRUE(sampler.indices(3).equal(RandomSampler(100, 1).indices(3)));
  EXPECT_FALSE(sampler.indices(3).equal(sampler.indices(4)));
  EXPECT_FALSE(sampler.indices(3).equal(RandomSampler(100, 2).indices(3)));
  EXPECT_FALSE(sampler.indices(1).equal(RandomSampler(100, 2).indices(0)));  // seed and epoch are not simply added
}

TEST(RandomSampler, LeavesTheGlobalGeneratorAlone) {
  torch::manual_seed(5);
  const auto expected = torch::rand(3);
  torch::manual_seed(5);
  RandomSampler(100, 1).indices(0);
  EXPECT_TRUE(torch::rand(3).equal(expected));
}

}  // namespace
}  // namespace fulgur
