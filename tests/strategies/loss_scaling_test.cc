#include "fulgur/strategies/engine/loss_scaling.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>

namespace fulgur {
namespace {

at::Tensor param_with_gradient(double gradient) {
  const at::Tensor param = torch::zeros({2}).requires_grad_();
  param.mutable_grad() = torch::full({2}, gradient);
  return param;
}

const at::Tensor kLoss = torch::ones({});
const std::vector<at::Tensor> kFinite = {param_with_gradient(1.0)};
const std::vector<at::Tensor> kInfinite = {param_with_gradient(std::numeric_limits<double>::infinity())};

std::function<double()> look_at(const std::vector<at::Tensor>& params) {
  return [&] { return params.front().grad().norm().item<double>(); };
}

TEST(LossScaling, MovesAfterEachStepOfOneOptimizer) {
  LossScaling scaling(1, {.init_scale = 8.0, .growth_interval = 2});
  const auto step = [&](const std::vector<at::Tensor>& params) {
    scaling.zeroed(0);
    EXPECT_EQ(scaling.scale(kLoss).item<double>(), scaling.loss_scale());
    scaling.is_non_finite(0, look_at(params));
    scaling.stepped(0);
    return scaling.loss_scale();
  };
  EXPECT_EQ(step(kInfinite), 4.0);
  EXPECT_EQ(step(kFinite), 4.0);
  EXPECT_EQ(step(kFinite), 8.0);
}

TEST(LossScaling, GradientsOfEveryOptimizerAreSteppedWithTheScaleThatTheyWereMadeWith) {
  LossScaling scaling(2, {.init_scale = 8.0});
  scaling.scale(kLoss);
  EXPECT_TRUE(scaling.is_non_finite(0, look_at(kInfinite)));
  scaling.stepped(0);
  EXPECT_EQ(scaling.loss_scale(), 4.0);
  EXPECT_EQ(scaling.factor(1), 1.0 / 8.0);
  EXPECT_TRUE(scaling.is_non_finite(1, look_at(kInfinite)));
  scaling.stepped(1);
  EXPECT_EQ(scaling.loss_scale(), 4.0);  // the overflow of one backward reduces the scale once
}

TEST(LossScaling, GradientsThatABackwardAddsToAreBroughtToItsScale) {
  LossScaling scaling(2, {.init_scale = 8.0});
  EXPECT_EQ(scaling.factor_for_backward(0), 1.0);  // there are none
  scaling.scale(kLoss);
  EXPECT_EQ(scaling.factor_for_backward(0), 1.0);
  scaling.unscaled(0);
  EXPECT_EQ(scaling.factor_for_backward(0), 8.0);
  scaling.is_non_finite(1, look_at(kInfinite));
  scaling.stepped(1);
  EXPECT_EQ(scaling.factor_for_backward(0), 4.0);
  EXPECT_EQ(scaling.factor_for_backward(1), 0.5);
  scaling.zeroed(1);
  EXPECT_EQ(scaling.factor_for_backward(1), 1.0);
  scaling.scale(kLoss);
  EXPECT_EQ(scaling.factor_for_backward(0), 1.0);
  EXPECT_EQ(scaling.factor(0), 1.0 / 4.0);
}

TEST(LossScaling, RemembersWhatItFoundBeforeTheGradientsWereUnscaled) {
  LossScaling scaling(1);
  scaling.scale(kLoss);
  EXPECT_TRUE(scaling.is_non_finite(0, look_at(kInfinite)));
  scaling.unscaled(0);
  EXPECT_EQ(scaling.factor(0), 1.0);
  EXPECT_TRUE(scaling.is_non_finite(0, look_at(kFinite)));  // remembered although a hook has clipped the gradients
  scaling.stepped(0);
  EXPECT_EQ(scaling.factor(0), 1.0);  // a further step without a backward finds the same gradients
  scaling.scale(kLoss);
  EXPECT_EQ(scaling.factor(0), 1.0 / 32768.0);
  EXPECT_FALSE(scaling.is_non_finite(0, look_at(kFinite)));
}

}  // namespace
}  // namespace fulgur
