#include "fulgur/metrics/regression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "tests/metrics/golden.h"
#include "tests/testing/errors.h"

namespace fulgur::metrics {
namespace {

constexpr auto kUpdate = [](auto& metric, const std::vector<at::Tensor>& batch, const Valid& valid) {
  metric.update(batch[0], batch[1], valid);
};

TEST(MeanSquaredError, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("MeanSquaredError")) {
    const MeanSquaredError metric({.squared = expected.options.at("squared")});
    testing::expect_golden(golden, expected, metric, kUpdate);
  }
}

TEST(MeanAbsoluteError, IsThatOfTorchmetrics) {
  const testing::Golden golden;
  for (const auto& expected : golden.cases("MeanAbsoluteError")) {
    testing::expect_golden(golden, expected, MeanAbsoluteError(), kUpdate);
  }
}

TEST(Regression, FunctionsGiveTheValueOfOneBatchOfAnyDtype) {
  const auto preds = torch::tensor({1, 2, 3, 4}), target = torch::tensor({1.0, 2.0, 3.0, 0.0});
  EXPECT_EQ(mean_squared_error(preds, target).item<double>(), 4.0);
  EXPECT_EQ(mean_squared_error(preds, target, {.squared = false}).item<double>(), 2.0);
  EXPECT_EQ(mean_absolute_error(preds, target).item<double>(), 1.0);
  EXPECT_EQ(mean_absolute_error(preds, torch::tensor({true, true, false, true})).item<double>(), 1.75);
}

TEST(Regression, ANaNThatIsNotValidDoesNotCount) {
  MeanAbsoluteError metric;
  metric.update(torch::tensor({1.0, std::nan("")}), torch::zeros({2}), torch::tensor({true, false}));
  EXPECT_EQ(metric.compute().item<double>(), 1.0);
}

TEST(Regression, RefusesDifferentShapes) {  // the shapes would broadcast
  MeanSquaredError metric;
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { metric.update(torch::zeros({3, 1}), torch::zeros({3})); }),
              ::testing::HasSubstr("preds and target must have the same shape; got [3, 1] and [3]"));
}

}  // namespace
}  // namespace fulgur::metrics
