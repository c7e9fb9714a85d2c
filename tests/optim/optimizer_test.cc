#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>

#include "core/error.h"
#include "optim/adam.h"
#include "optim/sgd.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

std::vector<at::Tensor> parameters() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  std::vector<at::Tensor> params;
  for (const int64_t size : {1, 7, 100}) params.push_back(torch::randn({size}, generator).requires_grad_());
  return params;
}

void set_gradients(const std::vector<at::Tensor>& params, int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  for (const at::Tensor& param : params) param.mutable_grad() = torch::randn(param.sizes(), generator);
}

// Runs both over the same gradients; torch's own optimizer is the oracle.
void expect_same_path(
    const std::function<Optimizers(std::vector<at::Tensor>)>& make_ours,
    const std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>& make_theirs) {
  const auto ours = parameters(), theirs = parameters();
  const Optimizers optimizers = make_ours(ours);
  const auto oracle = make_theirs(theirs);
  for (int step = 0; step < 20; ++step) {
    set_gradients(ours, step);
    set_gradients(theirs, step);
    for (const auto& optimizer : optimizers) optimizer->step();
    oracle->step();
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_LE((ours[i] - theirs[i]).norm().item<double>(), 1e-6 * theirs[i].norm().item<double>());
    EXPECT_FALSE(ours[i].equal(parameters()[i]));
  }
}

TEST(Adam, AgreesWithTorch) {
  expect_same_path(
      [](auto params) { return optim::Adam(params, {.lr = 0.1, .betas = {0.8, 0.95}, .weight_decay = 0.1}); },
      [](auto params) {
        return std::make_unique<torch::optim::Adam>(
            params, torch::optim::AdamOptions(0.1).betas({0.8, 0.95}).weight_decay(0.1));
      });
}

TEST(AdamW, AgreesWithTorch) {
  expect_same_path([](auto params) { return optim::AdamW(params, {.lr = 0.1, .weight_decay = 0.1}); },
                   [](auto params) {
                     return std::make_unique<torch::optim::AdamW>(params,
                                                                  torch::optim::AdamWOptions(0.1).weight_decay(0.1));
                   });
}

TEST(SGD, AgreesWithTorch) {
  expect_same_path(
      [](auto params) { return optim::SGD(params, {.lr = 0.1}); },
      [](auto params) { return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1)); });
}

TEST(SGD, AgreesWithTorchWithEverythingOn) {
  expect_same_path(
      [](auto params) {
        return optim::SGD(params, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.1});
      },
      [](auto params) {
        return std::make_unique<torch::optim::SGD>(
            params, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5).weight_decay(0.1));
      });
  expect_same_path([](auto params) { return optim::SGD(params, {.lr = 0.1, .momentum = 0.9, .nesterov = true}); },
                   [](auto params) {
                     return std::make_unique<torch::optim::SGD>(
                         params, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
                   });
}

// Every kind of optimizer, for what they have in common.
struct Kind {
  const char* name;
  std::function<Optimizers(std::vector<ParamGroup>)> make;
};

class EveryOptimizer : public ::testing::TestWithParam<Kind> {};

TEST_P(EveryOptimizer, LeavesAParameterWithoutGradientAlone) {
  const auto params = parameters(), alone = parameters();
  const Optimizers both = GetParam().make(one_group(params));
  const Optimizers one = GetParam().make(one_group({alone[1]}));
  for (int step = 0; step < 3; ++step) {
    set_gradients(params, step);
    set_gradients(alone, step);
    params[0].mutable_grad().reset();
    if (step == 1) params[1].mutable_grad().reset();  // skips its second step, so its own count stays behind
    for (const auto& optimizer : both) optimizer->step();
    if (step != 1) {
      for (const auto& optimizer : one) optimizer->step();
    }
  }
  EXPECT_TRUE(params[0].equal(parameters()[0]));
  EXPECT_TRUE(params[1].equal(alone[1]));
}

TEST_P(EveryOptimizer, GroupsHaveTheirOwnSettings) {
  const auto params = parameters();
  const Optimizers optimizers = GetParam().make({{.params = {params[0]}, .lr = 0.0}, {.params = {params[1]}}});
  set_gradients(params, 0);
  for (const auto& optimizer : optimizers) optimizer->step();
  EXPECT_TRUE(params[0].equal(parameters()[0]));
  EXPECT_FALSE(params[1].equal(parameters()[1]));
}

TEST_P(EveryOptimizer, UpdatesATiedParameterOnce) {
  const auto once = parameters(), twice = parameters();
  const Optimizers single = GetParam().make(one_group({once[2]}));
  const Optimizers tied = GetParam().make(one_group({twice[2], twice[2]}));
  set_gradients(once, 0);
  set_gradients(twice, 0);
  for (const auto& optimizer : single) optimizer->step();
  for (const auto& optimizer : tied) optimizer->step();
  EXPECT_TRUE(once[2].equal(twice[2]));
}

TEST_P(EveryOptimizer, ZeroGradDropsTheGradients) {
  const auto params = parameters();
  const Optimizers optimizers = GetParam().make(one_group(params));
  set_gradients(params, 0);
  for (const auto& optimizer : optimizers) optimizer->zero_grad();
  EXPECT_FALSE(params[0].grad().defined());
}

TEST_P(EveryOptimizer, RefusesBadParameters) {
  const auto params = parameters();
  const auto refusal = [](const std::vector<ParamGroup>& groups) {
    return message_of<UsageError>([&] { GetParam().make(groups); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("no parameter to update"));
  EXPECT_THAT(refusal(one_group({at::Tensor()})), HasSubstr("undefined"));
  EXPECT_THAT(refusal({{.params = params}, {.params = {params[1]}}}),
              HasSubstr("groups 0 and 1 have a parameter in common"));
  EXPECT_THAT(refusal({{.params = params, .lr = -1.0}}), HasSubstr("lr must be at least 0; got -1"));
}

INSTANTIATE_TEST_SUITE_P(, EveryOptimizer,
                         ::testing::Values(Kind{"Adam", [](auto groups) { return optim::Adam(groups); }},
                                           Kind{"AdamW", [](auto groups) { return optim::AdamW(groups); }},
                                           Kind{"SGD",
                                                [](auto groups) { return optim::SGD(groups, {.momentum = 0.9}); }}),
                         [](const auto& kind) { return kind.param.name; });

TEST(Optimizers, RefuseOptionsOutOfRange) {
  const auto params = parameters();
  EXPECT_THAT(message_of<UsageError>([&] { optim::AdamW adamw(params, {.lr = -1}); }),
              HasSubstr("AdamW: lr must be at least 0"));
  EXPECT_THAT(message_of<UsageError>([&] { optim::Adam adam(params, {.betas = {0.9, 1.0}}); }),
              HasSubstr("beta2 must be at most"));
  EXPECT_THAT(message_of<UsageError>([&] { optim::SGD sgd(params, {.nesterov = true}); }),
              HasSubstr("nesterov needs momentum"));
}

}  // namespace
}  // namespace fulgur
