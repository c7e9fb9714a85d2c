#include "fulgur/data/random.h"

#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>

namespace fulgur {
namespace {

// The first outputs of SplitMix64 with seed 1234567, from Vigna's reference implementation (prng.di.unimi.it).
TEST(Random, IsSplitMix64) {
  Random random(1234567);
  EXPECT_EQ(random.bits(), 6457827717110365317U);
  EXPECT_EQ(random.bits(), 3203168211198807973U);
  EXPECT_EQ(random.bits(), 9817491932198370423U);
}

TEST(Random, UniformHasTheMomentsOfItsDistribution) {
  Random random(1);
  constexpr int kDraws = 100'000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.uniform();
    ASSERT_TRUE(x >= 0 && x < 1);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * 0.2887 / std::sqrt(kDraws));
  EXPECT_NEAR(squares / kDraws, 1.0 / 3, 5 * 0.2981 / std::sqrt(kDraws));
}

TEST(Random, NormalHasTheMomentsOfItsDistribution) {
  Random random(2);
  constexpr int kDraws = 100'000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0.0, 5 / std::sqrt(kDraws));
  EXPECT_NEAR(squares / kDraws, 1.0, 5 * std::sqrt(2.0 / kDraws));
}

TEST(Random, BelowGivesEachNumberEquallyOften) {
  Random random(3);
  constexpr int kDraws = 60'000;
  std::array<int, 6> counts{};
  for (int i = 0; i < kDraws; ++i) ++counts[static_cast<size_t>(random.below(6))];
  double chi_squared = 0;
  for (const int count : counts) chi_squared += (count - 10'000.0) * (count - 10'000.0) / 10'000.0;
  EXPECT_LT(chi_squared, 20.5);  // five degrees of freedom: p = 0.001
  EXPECT_THROW(random.below(0), c10::ValueError);
}

TEST(Random, EachSampleOfEachEpochHasItsOwn) {
  std::set<uint64_t> first;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    for (int64_t epoch = 0; epoch < 10; ++epoch) {
      for (int64_t index = 0; index < 100; ++index) first.insert(SampleRandom{seed, epoch}.of(index).bits());
    }
  }
  EXPECT_EQ(first.size(), 5000U);
  EXPECT_EQ(SampleRandom({.seed = 1, .epoch = 2}).of(3).bits(), SampleRandom({.seed = 1, .epoch = 2}).of(3).bits());
}

TEST(Random, GivesAGeneratorForATen) {
  const auto draw = [] {
    Random random(4);
    return at::randperm(20, random.generator());
  };
  EXPECT_TRUE(draw().equal(draw()));
}

}  // namespace
}  // namespace fulgur
