#include "fulgur/metrics/aggregation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "tests/metrics/golden.h"
#include "tests/testing/errors.h"

namespace fulgur::metrics {
namespace {

TEST(Mean, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("Mean")) {
    testing::expect_golden(
        golden, expected, Mean(), [](Mean& metric, const std::vector<at::Tensor>& batch, const Valid& valid) {
          const bool is_weighted = batch.size() == 2;
          is_weighted ? metric.update(batch[0], batch[1], valid) : metric.update(batch[0], 1.0, valid);
        });
  }
}

TEST(Sum, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("Sum")) {
    testing::expect_golden(
        golden, expected, Sum(),
        [](Sum& metric, const std::vector<at::Tensor>& batch, const Valid& valid) { metric.update(batch[0], valid); });
  }
}

TEST(Mean, WeighsNumbersAndTensors) {
  Mean mean;
  mean.update(1.0);
  mean.update(torch::tensor(4.0), 2);
  mean.update(torch::tensor({{5, 5}, {5, 5}}), torch::tensor({0.5, 0.5}));
  EXPECT_DOUBLE_EQ(mean.compute().item<double>(), (1.0 + 8.0 + 10.0) / 5.0);
}

TEST(Mean, ANaNStaysVisible) {
  Mean mean;
  EXPECT_TRUE(std::isnan(mean.compute().item<double>()));
  mean.update(torch::tensor({1.0, std::nan("")}));
  EXPECT_TRUE(std::isnan(mean.compute().item<double>()));
}

TEST(Mean, RefusesAWeightThatDoesNotBroadcast) {
  Mean mean;
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { mean.update(torch::zeros({4}), torch::ones({3})); }),
              ::testing::HasSubstr("weight of shape [3] cannot be broadcast to value of shape [4]"));
}

TEST(Sum, ManySmallNumbersStayExact) {  // float32 would stop at 2^24
  Sum sum;
  sum.update(torch::tensor(16777216.0F));
  for (int i = 0; i < 3; ++i) sum.update(torch::tensor(1.0F));
  EXPECT_EQ(sum.compute().item<double>(), 16777219.0);
}

}  // namespace
}  // namespace fulgur::metrics
