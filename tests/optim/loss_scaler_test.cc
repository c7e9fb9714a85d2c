#include "fulgur/optim/loss_scaler.h"

#include <ATen/Context.h>
#include <ATen/ops/_amp_update_scale.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>
#include <random>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur::optim {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// Torch's own rule, which GradScaler.update calls.
struct TorchScale {
  LossScalerOptions options;
  at::Tensor scale = torch::full({}, options.init_scale, at::kFloat);
  at::Tensor growth_tracker = torch::zeros({}, at::kInt);
  void update(bool found_inf) {
    at::_amp_update_scale_(scale, growth_tracker, torch::full({}, found_inf ? 1.0 : 0.0, at::kFloat),
                           options.growth_factor, options.backoff_factor, options.growth_interval);
  }
};

TEST(LossScaler, MovesAsTorchsGradScaler) {
  const LossScalerOptions all_options[] = {
      {},
      {.growth_interval = 7},
      {.init_scale = 1e38, .growth_interval = 1},  // grows into infinity, and stays there
      {.init_scale = 1000.0, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 3}};
  std::mt19937 random(1);
  for (const LossScalerOptions& options : all_options) {
    LossScaler scaler(options);
    TorchScale expected{options};
    for (int step = 0; step < 5000; ++step) {
      const bool found_inf = random() % 16 == 0 && expected.scale.item<double>() > 1e-20;
      scaler.update(found_inf);
      expected.update(found_inf);
      ASSERT_EQ(scaler.loss_scale(), expected.scale.item<double>()) << "step " << step;
      ASSERT_EQ(scaler.state().growth_tracker, expected.growth_tracker.item<int64_t>()) << "step " << step;
    }
  }
}

TEST(LossScaler, ScalesTheLossAndFactorUndoesIt) {
  const LossScaler scaler;
  const at::Tensor w = torch::tensor(3.0F).requires_grad_();
  const at::Tensor scaled = scaler.scale(w.square());
  EXPECT_EQ(scaled.item<double>(), 9.0 * 65536.0);
  scaled.backward();
  EXPECT_EQ(w.grad().item<double>() * scaler.factor(), 6.0);
}

TEST(LossScaler, ScaleDoesNotOverflowAHalfLoss) {
  const at::Tensor scaled = LossScaler().scale(torch::ones({1}, at::kHalf));
  EXPECT_EQ(scaled.scalar_type(), at::kFloat);
  EXPECT_EQ(scaled.item<double>(), 65536.0);
  EXPECT_EQ(LossScaler().scale(torch::ones({}, at::kDouble)).scalar_type(), at::kDouble);
}

TEST(LossScaler, StateContinues) {
  LossScaler scaler({.growth_interval = 5});
  for (const bool found_inf : {true, false, false, false}) scaler.update(found_inf);
  EXPECT_EQ(scaler.state(), (LossScalerState{.scale = 32768.0, .growth_tracker = 3}));
  LossScaler resumed({.growth_interval = 5});
  resumed.load_state(scaler.state());
  for (int i = 0; i < 2; ++i) resumed.update(false);
  EXPECT_EQ(resumed.loss_scale(), 65536.0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { resumed.load_state({.scale = -1.0}); }), HasSubstr("above 0"));
}

TEST(LossScaler, GivesUpWhenItIsNotTheScale) {
  LossScaler scaler;
  EXPECT_THAT(message_of<c10::Error>([&] {
                for (int i = 0; i < 1000; ++i) scaler.update(true);
              }),
              HasSubstr("is the loss NaN"));
}

TEST(LossScaler, RefusesSettingsThatDoNotWork) {
  EXPECT_THROW(LossScaler({.init_scale = 0.0}), UsageError);
  EXPECT_THROW(LossScaler({.growth_factor = 0.5}), UsageError);
  EXPECT_THROW(LossScaler({.backoff_factor = 1.5}), UsageError);
  EXPECT_THROW(LossScaler({.growth_interval = 0}), UsageError);
}

TEST(AnyNonFinite, FindsInfinitiesAndNaNsAndChangesNothing) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor fine = torch::randn({3, 5}).to(dtype), before = fine.clone();
    EXPECT_FALSE(any_non_finite({fine, at::Tensor(), torch::zeros({0}), torch::full({2}, 3e38F)}));
    EXPECT_TRUE(fine.equal(before));
    for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
      const at::Tensor gradient = torch::zeros({100}, dtype);
      gradient[67] = bad;
      EXPECT_TRUE(any_non_finite({fine, gradient})) << dtype << " " << bad;
    }
  }
  EXPECT_FALSE(any_non_finite({}));
}

TEST(AnyNonFinite, IsTheSameOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor fine = torch::full({100}, 6e4, at::device(at::kCUDA).dtype(dtype)), bad = fine.clone();
    const at::Tensor large = torch::full({2}, 3e38, at::device(at::kCUDA).dtype(at::kFloat));
    bad[67] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_FALSE(any_non_finite({fine, at::Tensor(), torch::zeros({0}, at::kCUDA), large})) << dtype;
    EXPECT_TRUE(any_non_finite({large, fine, bad})) << dtype;
    EXPECT_TRUE(fine.eq(fine[0]).all().item<bool>()) << dtype;
  }
}

}  // namespace
}  // namespace fulgur::optim
