#include "fulgur/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using testing::message_of;

std::vector<int64_t> list(const at::Tensor& tensor) {
  return {tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel()};
}

TEST(SubsetSampler, VisitsItsSamplesOnceInAnOrderOfTheEpoch) {
  const SubsetSampler sampler(torch::tensor({5, 2, 9, 7, 11, 3}), 1);
  auto first = list(sampler.indices(0));
  EXPECT_NE(first, list(sampler.indices(1)));
  EXPECT_EQ(first, list(sampler.indices(0)));
  std::ranges::sort(first);
  EXPECT_THAT(first, ElementsAre(2, 3, 5, 7, 9, 11));
}

TEST(SubsetSampler, RefusesWhatIsNoListOfIndices) {
  EXPECT_EQ(message_of<UsageError>([] { SubsetSampler(torch::zeros({0}, at::kLong), 1); }),
            "SubsetSampler: the indices must be a list of at least one int64; got 0 numbers");
  EXPECT_EQ(message_of<UsageError>([] { SubsetSampler(torch::tensor({1, -4}), 1); }),
            "SubsetSampler: -4 is no index of a sample");
}

TEST(WeightedSampler, DrawsInProportionToTheWeights) {
  constexpr int64_t kDraws = 100'000;
  const WeightedSampler sampler(torch::tensor({1.0, 0.0, 3.0, 6.0, 0.0}), {.num_samples = kDraws, .seed = 3});
  std::map<int64_t, double> counts;
  for (const int64_t i : list(sampler.indices(0))) ++counts[i];
  EXPECT_EQ(counts.size(), 3U);
  double chi_squared = 0;
  for (const auto& [i, expected] : {std::pair(0, 0.1), std::pair(2, 0.3), std::pair(3, 0.6)}) {
    chi_squared += std::pow(counts[i] - expected * kDraws, 2) / (expected * kDraws);
  }
  EXPECT_LT(chi_squared, 13.8);  // two degrees of freedom: p = 0.001
  EXPECT_FALSE(sampler.indices(0).equal(sampler.indices(1)));
}

// The first of a draw without replacement is sample i with probability w_i; no sample comes twice.
TEST(WeightedSampler, WithoutReplacementDrawsEachSampleOnce) {
  const WeightedSampler sampler(torch::tensor({1.0, 0.0, 3.0, 6.0}),
                                {.num_samples = 3, .seed = 3, .replacement = false});
  constexpr int64_t kEpochs = 20'000;
  std::map<int64_t, double> first;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    auto drawn = list(sampler.indices(epoch));
    ++first[drawn[0]];
    std::ranges::sort(drawn);
    ASSERT_THAT(drawn, ElementsAre(0, 2, 3));
  }
  double chi_squared = 0;
  for (const auto& [i, expected] : {std::pair(0, 0.1), std::pair(2, 0.3), std::pair(3, 0.6)}) {
    chi_squared += std::pow(first[i] - expected * kEpochs, 2) / (expected * kEpochs);
  }
  EXPECT_LT(chi_squared, 13.8);  // two degrees of freedom: p = 0.001
}

TEST(WeightedSampler, RefusesWeightsThatCannotBeDrawnBy) {
  EXPECT_EQ(message_of<UsageError>([] { WeightedSampler(torch::tensor({1.0, -2.0})); }),
            "WeightedSampler: the weight of sample 1 is -2; weights must be 0 or more");
  EXPECT_EQ(message_of<UsageError>([] { WeightedSampler(torch::tensor({1.0, std::nan("")})); }),
            "WeightedSampler: the weight of sample 1 is nan; weights must be 0 or more");
  EXPECT_EQ(message_of<UsageError>([] { WeightedSampler(torch::zeros(3)); }),
            "WeightedSampler: all weights are 0, so that no sample can be drawn");
  EXPECT_EQ(message_of<UsageError>(
                [] { WeightedSampler(torch::tensor({1.0, 0.0, 1.0}), {.num_samples = 3, .replacement = false}); }),
            "WeightedSampler: num_samples is 3, but 2 samples have a weight above 0 and each may be drawn once; draw "
            "fewer, or set replacement");
}

std::vector<int64_t> odd_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 200; ++i) lengths.push_back(1 + (i * 37) % 64);
  return lengths;
}

TEST(SimilarLengthSampler, HasEverySampleOnceAndStaysWithinTheBudget) {
  const auto lengths = odd_lengths();
  const SimilarLengthSampler sampler(lengths, {.max_tokens = 128, .seed = 5});
  for (const int64_t epoch : {0, 1}) {
    std::vector<int64_t> all;
    for (const at::Tensor& batch : sampler.batches(epoch)) {
      int64_t longest = 0;
      for (const int64_t i : list(batch)) {
        longest = std::max(longest, lengths[static_cast<size_t>(i)]);
        all.push_back(i);
      }
      EXPECT_LE(longest * batch.numel(), 128);
    }
    std::ranges::sort(all);
    std::vector<int64_t> expected(lengths.size());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected);
  }
  EXPECT_FALSE(sampler.batches(0)[0].equal(sampler.batches(1)[0]));
}

TEST(SimilarLengthSampler, PadsLessThanAShuffledOrder) {
  const auto lengths = odd_lengths();
  const auto padded = [&](const std::vector<at::Tensor>& batches) {
    int64_t tokens = 0;
    for (const at::Tensor& batch : batches) {
      int64_t longest = 0;
      for (const int64_t i : list(batch)) longest = std::max(longest, lengths[static_cast<size_t>(i)]);
      tokens += longest * batch.numel();
    }
    return tokens;
  };
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const SimilarLengthSampler similar(lengths, {.batch_size = 8, .seed = 5});
  EXPECT_LT(padded(similar.batches(0)), tokens * 105 / 100);
  EXPECT_GT(padded(RandomSampler(200, 5).indices(0).split(8)), tokens * 3 / 2);
}

TEST(SimilarLengthSampler, RefusesWhatCannotBeCut) {
  EXPECT_EQ(message_of<UsageError>([] { SimilarLengthSampler({3, 0}, {.batch_size = 2}); }),
            "SimilarLengthSampler: there must be a length of at least 1 for each sample");
  EXPECT_EQ(message_of<UsageError>([] { SimilarLengthSampler({3}, {}); }),
            "SimilarLengthSampler: give a batch_size, max_tokens, or both");
  EXPECT_EQ(message_of<UsageError>([] { SimilarLengthSampler({3, 9}, {.max_tokens = 8}); }),
            "SimilarLengthSampler: sample 1 has 9 tokens, more than max_tokens (8); cut it, or leave it out");
}

}  // namespace
}  // namespace fulgur
