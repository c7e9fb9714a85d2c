#include "fulgur/strategies/precision.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

TEST(Precision, KnowsLightningsNames) {
  const std::pair<std::string, std::string> names[] = {{"32", "32"},
                                                       {"32-true", "32"},
                                                       {"64", "64"},
                                                       {"64-true", "64"},
                                                       {"bf16-mixed", "bf16-mixed"},
                                                       {"bf16", "bf16-mixed"},
                                                       {"16", "16-mixed"},
                                                       {"16-mixed", "16-mixed"},
                                                       {"BF16_Mixed", "bf16-mixed"},
                                                       {"bf16-true", "bf16-true"},
                                                       {"16-true", "16-true"}};
  for (const auto& [asked, name] : names) EXPECT_EQ(Precision(asked).name(), name) << asked;
  EXPECT_EQ(Precision().name(), "32");
}

TEST(Precision, RefusesAnotherNameWithTheKnownOnes) {
  EXPECT_THAT(message_of<UsageError>([] { Precision("bf16-mixd"); }),
              ::testing::AllOf(HasSubstr("unknown precision 'bf16-mixd'; did you mean 'bf16-mixed'?"),
                               HasSubstr("16-mixed"), HasSubstr("64")));
}

TEST(Precision, SaysWhatItNeeds) {
  for (const auto* name : {"32", "64", "bf16-mixed", "bf16-true"}) EXPECT_FALSE(Precision(name).needs_loss_scale());
  for (const auto* name : {"16-mixed", "16-true"}) EXPECT_TRUE(Precision(name).needs_loss_scale());
  EXPECT_TRUE(Precision("16-true").is_true_16_bit());
  EXPECT_FALSE(Precision("64").is_true_16_bit());
  EXPECT_FALSE(Precision("16-mixed").is_true_16_bit());
}

TEST(Precision, ConvertsTheFloatingTensorsOfABatch) {
  const Batch batch{
      {"x", torch::ones({2})}, {"label", torch::ones({2}, at::kLong)}, {"mask", torch::ones({2}, at::kBool)}};
  const Batch converted = Precision("64").convert(batch);
  EXPECT_EQ(converted["x"].scalar_type(), at::kDouble);
  EXPECT_EQ(converted["label"].scalar_type(), at::kLong);
  EXPECT_EQ(converted["mask"].scalar_type(), at::kBool);
  EXPECT_EQ(Precision("bf16-true").convert(batch)["x"].scalar_type(), at::kBFloat16);
  for (const auto* name : {"32", "bf16-mixed", "16-mixed"}) {
    EXPECT_TRUE(Precision(name).convert(batch)["x"].is_same(batch["x"])) << name;
  }
}

TEST(ConvertedModule, HasEveryFloatingTensorInTheTypeAndThenInItsOwn) {
  torch::nn::BatchNorm1d module(3);
  module->weight.set_data(module->weight.detach().to(at::kDouble));  // makes the types mixed
  module->num_batches_tracked.fill_(1000001);
  const at::Tensor weight = module->weight;
  weight.mutable_grad() = torch::ones_like(weight);

  ConvertedModule converted(*module, Precision("bf16-true"));
  EXPECT_TRUE(module->weight.is_same(weight));
  EXPECT_EQ(weight.scalar_type(), at::kBFloat16);
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_EQ(module->running_mean.scalar_type(), at::kBFloat16);
  EXPECT_EQ(module->running_var.scalar_type(), at::kBFloat16);
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 1000001);  // bf16 cannot represent this number
  EXPECT_EQ(module->num_batches_tracked.scalar_type(), at::kLong);

  converted.give_back();
  EXPECT_EQ(weight.scalar_type(), at::kDouble);
  EXPECT_EQ(module->running_var.scalar_type(), at::kFloat);
}

TEST(ConvertedModule, LeavesAModuleAloneWhereNothingIsConverted) {
  torch::nn::Linear module(2, 2);
  module->to(at::kDouble);
  for (const auto* name : {"32", "bf16-mixed", "16-mixed"}) {
    ConvertedModule converted(*module, Precision(name));
    EXPECT_EQ(module->weight.scalar_type(), at::kDouble) << name;
  }
}

TEST(ScopedPrecision, IsAutocastForAsLongAsItLives) {
  const torch::nn::Linear module(2, 2);
  const auto dtype = [&] { return torch::linear(torch::ones({1, 2}), module->weight).scalar_type(); };
  {
    const ScopedPrecision scope(Precision("bf16-mixed"), c10::kCPU);
    EXPECT_EQ(dtype(), at::kBFloat16);
    {
      const ScopedPrecision inner(Precision("16-mixed"), c10::kCPU);
      EXPECT_EQ(dtype(), at::kHalf);
      const ScopedFullPrecision outside(Precision("16-mixed"), c10::kCPU);
      EXPECT_EQ(dtype(), at::kFloat);
    }
    EXPECT_EQ(dtype(), at::kBFloat16);
  }
  EXPECT_EQ(dtype(), at::kFloat);
  const ScopedPrecision scope(Precision("32"), c10::kCPU);
  EXPECT_EQ(dtype(), at::kFloat);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);  // torch's own default is back
}

TEST(ScopedPrecision, NoCastWeightOutlivesAnUpdateInIt) {
  const Precision precision("bf16-mixed");
  const torch::nn::Linear module(2, 2);
  const auto output = [&] { return torch::linear(torch::ones({1, 2}), module->weight).sum(); };
  const ScopedPrecision scope(precision, c10::kCPU);
  const at::Tensor before = output();
  {
    const ScopedFullPrecision outside(precision, c10::kCPU);
    const c10::NoGradGuard no_grad;
    module->weight.add_(10);
  }
  EXPECT_FALSE(output().equal(before));
}

}  // namespace
}  // namespace fulgur
