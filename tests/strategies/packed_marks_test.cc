#include "fulgur/strategies/engine/packed_marks.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace fulgur {
namespace {

// Sums in fp32, in which messages travel with the last bucket.
void expect_counts_of_all_ranks(int64_t world_size, size_t num_marks) {
  std::mt19937 random(static_cast<unsigned>(world_size));
  std::vector<double> expected(num_marks, 0.0);
  std::vector<float> sums(num_packed(num_marks, world_size), 0.0F);
  for (int64_t rank = 0; rank < world_size; ++rank) {
    std::vector<bool> marks;
    for (size_t i = 0; i < num_marks; ++i) {
      marks.push_back(i % 5 == 0 || random() % 3 == 0);  // every rank sets each fifth mark
      expected[i] += marks.back() ? 1.0 : 0.0;
    }
    const std::vector<double> packed = pack_marks(marks, world_size);
    ASSERT_EQ(packed.size(), sums.size());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<float>(packed[i]);
  }
  EXPECT_EQ(unpack_counts(std::vector<double>(sums.begin(), sums.end()), num_marks, world_size), expected)
      << world_size << " ranks";
}

TEST(PackedMarks, TellHowManyRanksHaveSetEach) {
  for (const int64_t world_size : {1, 2, 3, 4, 7, 8, 64, 255, 1000, 5000}) expect_counts_of_all_ranks(world_size, 31);
  expect_counts_of_all_ranks(3, 0);
}

TEST(PackedMarks, TakeFewBitsOfEachNumber) {
  EXPECT_EQ(num_packed(1200, 2), 100);
  EXPECT_EQ(num_packed(1200, 3), 100);
  EXPECT_EQ(num_packed(1200, 64), 400);
  EXPECT_EQ(num_packed(1, 1 << 23), 1);
}

}  // namespace
}  // namespace fulgur
