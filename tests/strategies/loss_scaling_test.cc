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
  EXPECT_EQ(scaling.loss_scale(), 8.0);  // the other optimizer has not stepped yet
  EXPECT_FALSE(scaling.is_non_finite(1, look_at(kFinite)));
  EXPECT_EQ(scaling.factor(1), 1.0 / 8.0);
  scaling.stepped(1);
  EXPECT_EQ(scaling.loss_scale(), 4.0);

  scaling.scale(kLoss);
  scaling.is_non_finite(0, look_at(kInfinite));
  scaling.stepped(0);
  scaling.zeroed(1);  // drops gradients that no optimizer needs, as in a GAN
  EXPECT_EQ(scaling.loss_scale(), 2.0);
}

// The order of a GAN: gradients for the first optimizer wait while the state is saved, and are dropped afterwards.
TEST(LossScaling, ItsStateHasTheStepBeforeWaitingGradients) {
  LossScaling scaling(2, {.init_scale = 8.0});
  scaling.scale(kLoss);
  scaling.is_non_finite(1, look_at(kInfinite));
  scaling.stepped(1);
  EXPECT_EQ(scaling.loss_scale(), 8.0);
  LossScaling resumed(2, {.init_scale = 8.0});
  resumed.load_state(scaling.state());
  for (LossScaling* each : {&scaling, &resumed}) {
    each->zeroed(0);
    EXPECT_EQ(each->loss_scale(), 4.0);
    EXPECT_EQ(each->state().growth_tracker, 0);
  }
}

TEST(LossScaling, RemembersWhatItFoundBeforeTheGradientsWereUnscaled) {
  LossScaling scaling(1);
  scaling.scale(kLoss);
  EXPECT_TRUE(scaling.is_non_finite(0, look_at(kInfinite)));
  scaling.unscaled(0);
  EXPECT_EQ(scaling.factor(0), 1.0);
  EXPECT_TRUE(scaling.is_non_finite(0, look_at(kFinite)));  // remembered although a hook has clipped the gradients
  scaling.stepped(0);
  EXPECT_EQ(scaling.factor(0), 1.0 / 32768.0);
}

}  // namespace
}  // namespace fulgur
