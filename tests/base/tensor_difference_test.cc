#include "fulgur/base/tensor_difference.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>

namespace fulgur {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

TEST(LargestDifference, IsThatOfValuesThatDiffer) {
  const at::Tensor masked = torch::tensor({1.0, -kInfinity, kNan});
  EXPECT_EQ(largest_difference(masked, masked.clone()), 0);
  EXPECT_EQ(largest_difference(masked, torch::tensor({1.5, -kInfinity, kNan})), 0.5);
  EXPECT_EQ(largest_difference(masked, torch::tensor({1.0, kInfinity, kNan})), kInfinity);
  EXPECT_EQ(largest_difference(masked, torch::tensor({1.0, -kInfinity, 0.0})), kInfinity);
}

}  // namespace
}  // namespace fulgur
