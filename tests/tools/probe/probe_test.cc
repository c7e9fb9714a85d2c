#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include "tests/tools/probe/lib.h"
TEST(Probe, Works) {
  EXPECT_EQ(two().sum().item<float>(), 2);
  EXPECT_EQ(fmt::format("{}", 3), "3");
  EXPECT_FALSE(torch::cuda::is_available());
  torch::nn::Linear l(2, 3);
}
