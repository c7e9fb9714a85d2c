#include "fulgur/strategies/engine/host_adder.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace fulgur {
namespace {

TEST(HostAdder, HasTheBitsOfOneThread) {
  for (const int64_t num_threads : {1, 3}) {
    HostAdder adder(num_threads);
    for (const int64_t num_elements : {0, 1, 65'536, 65'537, 500'000}) {
      for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const at::Tensor first = torch::randn({num_elements}).to(dtype),
                         second = torch::randn({num_elements}).to(dtype);
        const at::Tensor sum = torch::full({num_elements}, 7.0F);
        adder.set(sum, first);
        EXPECT_TRUE(sum.equal(first.to(at::kFloat)));
        adder.add(sum, second);
        EXPECT_TRUE(sum.equal(first.to(at::kFloat) + second));
      }
    }
  }
}

TEST(HostAdder, ThrowsWhatAnAdditionThrows) {
  HostAdder adder(2);
  const at::Tensor sum = torch::zeros({200'000}, at::kLong);
  EXPECT_THROW(adder.add(sum, torch::ones({200'000})), c10::Error);  // floating numbers do not go into whole ones
}

}  // namespace
}  // namespace fulgur
