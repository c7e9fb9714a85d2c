#include "fulgur/nn/tie_parameter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <memory>

#include "fulgur/core/module_state.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

struct Tied : torch::nn::Module {
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
  Tied() {
    embedding = register_module("embedding", torch::nn::Embedding(5, 3));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false)));
    tie_parameter(*head, "weight", head->weight, embedding->weight);
  }
  at::Tensor forward(const at::Tensor& token) { return head->forward(embedding->forward(token)); }
};

TEST(TieParameter, MemberAndRegisteredParameterAreTheOtherTensor) {
  const auto tied = std::make_shared<Tied>();
  EXPECT_TRUE(tied->head->weight.is_same(tied->embedding->weight));
  EXPECT_TRUE(tied->head->named_parameters()["weight"].is_same(tied->embedding->weight));
}

TEST(TieParameter, GradientIsTheSumOverBothUses) {
  const auto tied = std::make_shared<Tied>();
  const at::Tensor in = tied->embedding->weight.detach().clone().requires_grad_();
  const at::Tensor out = tied->embedding->weight.detach().clone().requires_grad_();
  const at::Tensor token = torch::tensor({1, 4});
  tied->forward(token).square().sum().backward();
  in.index_select(0, token).matmul(out.t()).square().sum().backward();
  EXPECT_TRUE(tied->embedding->weight.grad().allclose(in.grad() + out.grad()));
}

TEST(TieParameter, StateHoldsItOnceUnderItsFirstName) {
  const auto tied = std::make_shared<Tied>();
  const auto state = named_state(*tied);
  ASSERT_EQ(state.size(), 1u);
  EXPECT_EQ(state[0].first, "embedding.weight");
}

TEST(TieParameter, StaysTiedInAnotherDtype) {
  const auto tied = std::make_shared<Tied>();
  tied->to(at::kDouble);
  EXPECT_TRUE(tied->head->weight.is_same(tied->embedding->weight));
  EXPECT_EQ(tied->head->weight.scalar_type(), at::kDouble);
}

TEST(TieParameter, WhatCannotBeTiedIsRefusedAndLeftAsItWas) {
  torch::nn::Linear linear(3, 5);
  const at::Tensor weight = linear->weight;
  const auto refusal = [&](const std::string& name, at::Tensor& member, const at::Tensor& other) {
    return message_of<c10::ValueError>([&] { tie_parameter(*linear, name, member, other); });
  };
  EXPECT_THAT(refusal("wieght", linear->weight, weight), HasSubstr("has no parameter 'wieght' of its own"));
  EXPECT_THAT(refusal("weight", linear->bias, weight), HasSubstr("is not that parameter"));
  EXPECT_THAT(refusal("weight", linear->weight, torch::zeros({3, 5})), HasSubstr("tied tensors have one shape"));
  EXPECT_THAT(refusal("weight", linear->weight, {}), HasSubstr("tied tensors have one shape"));
  EXPECT_THAT(refusal("weight", linear->weight, torch::zeros({5, 3}, at::kHalf)), HasSubstr("differ in dtype"));
  EXPECT_TRUE(linear->weight.is_same(weight));
  EXPECT_TRUE(linear->named_parameters()["weight"].is_same(weight));
}

}  // namespace
}  // namespace fulgur
