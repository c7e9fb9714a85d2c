#include "fulgur/strategies/engine/flat_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/sgd.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

struct Net : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor scale;
  Net() {
    first = register_module("first", torch::nn::Linear(8, 16));
    second = register_module("second", torch::nn::Linear(16, 16));
    third = register_module("third", torch::nn::Linear(16, 3));
    scale = register_parameter("scale", torch::ones({3}, torch::kDouble));
  }
};

Optimizers adam(const torch::nn::Module& module) { return optim::AdamW(module.parameters(), {}); }

std::vector<std::vector<std::string>> names_in(const FlatParameters& flat) {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : flat.buckets()) {
    for (names.emplace_back(); const auto& slot : bucket.slots) names.back().push_back(slot.name);
  }
  return names;
}

TEST(FlatParameters, KeepsTheModuleAsItWasAndShowsEveryUpdate) {
  Net net;
  std::vector<at::Tensor> before;
  for (const auto& param : net.parameters()) before.push_back(param.detach().clone());
  const at::Tensor held = net.second->weight;
  const FlatParameters flat(net, adam(net));
  const auto after = net.parameters();
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(after[i].equal(before[i]));
    EXPECT_TRUE(after[i].is_leaf() && after[i].requires_grad());
  }
  for (const auto& bucket : flat.buckets()) {
    const at::NoGradGuard no_grad;
    at::Tensor(bucket.flat).add_(1.0);
  }
  EXPECT_TRUE(held.equal(before[3] + 1.0));
  held.sum().backward();
  EXPECT_TRUE(net.second->weight.grad().equal(torch::ones({16, 16})));
}

TEST(FlatParameters, BucketsRunBackwardsAndCrossNoDtype) {
  Net net;
  const FlatParameters flat(net, adam(net), {.first_bucket_bytes = 300, .bucket_cap_bytes = 1100});
  EXPECT_THAT(names_in(flat), ElementsAre(ElementsAre("third.bias", "third.weight"),
                                          ElementsAre("second.bias", "second.weight"),  // 64 + 1024 bytes
                                          ElementsAre("first.bias", "first.weight"), ElementsAre("scale")));
  EXPECT_EQ(flat.buckets()[3].flat.scalar_type(), torch::kDouble);
}

TEST(FlatParameters, ParametersBeginWhereTheAlignmentLetsThem) {
  for (const int64_t alignment : {64, 256}) {
    Net net;
    const FlatParameters flat(net, adam(net), {.slot_alignment_bytes = alignment});
    for (const auto& bucket : flat.buckets()) {
      for (const auto& slot : bucket.slots) {
        EXPECT_EQ(slot.begin * static_cast<int64_t>(bucket.flat.element_size()) % alignment, 0);
      }
    }
    EXPECT_EQ(flat.buckets()[0].slots[1].begin * 4, alignment);  // 3 elements lie before it
  }
}

TEST(FlatParameters, ALargeParameterTravelsAlone) {
  Net net;
  const FlatParameters flat(net, adam(net), {.first_bucket_bytes = 100, .bucket_cap_bytes = 100});
  EXPECT_THAT(names_in(flat),
              ElementsAre(ElementsAre("third.bias"), ElementsAre("third.weight"), ElementsAre("second.bias"),
                          ElementsAre("second.weight"), ElementsAre("first.bias"), ElementsAre("first.weight"),
                          ElementsAre("scale")));
}

TEST(FlatParameters, AParameterThatCountsAsLargeTravelsAloneBesideBucketsOfSmallOnes) {
  Net net;
  const FlatParameters flat(net, adam(net), {.bucket_cap_bytes = 1 << 20, .large_bytes = 4 * 16 * 8});
  EXPECT_THAT(names_in(flat), ElementsAre(ElementsAre("second.weight"),
                                          ElementsAre("third.bias", "third.weight", "second.bias", "first.bias"),
                                          ElementsAre("first.weight"), ElementsAre("scale")));
}

TEST(FlatParameters, LengthsDivideByTheRanksAndPaddingIsZero) {
  for (const int64_t world_size : {1, 2, 3, 7}) {
    Net net;
    const FlatParameters flat(net, adam(net), {.world_size = world_size});
    for (const auto& bucket : flat.buckets()) {
      EXPECT_EQ(bucket.flat.numel() % (64 * world_size), 0);
      int64_t used = 0;
      double sum = 0.0;
      for (const auto& slot : bucket.slots) {
        EXPECT_EQ(slot.begin * static_cast<int64_t>(bucket.flat.element_size()) % 64, 0);
        used += slot.num_elements;
        sum += slot.param.abs().sum().item<double>();
      }
      EXPECT_LE(used, bucket.flat.numel());
      EXPECT_NEAR(bucket.flat.abs().sum().item<double>(), sum, 1e-4);
    }
  }
}

TEST(FlatParameters, GroupsHaveBucketsOfTheirOwn) {
  Net net;
  Optimizers optimizers;
  optimizers.add(optim::AdamW(
      std::vector<ParamGroup>{{.params = net.first->parameters()}, {.params = net.second->parameters(), .lr = 1.0}}));
  optimizers.add(optim::AdamW(net.third->parameters(), {}));
  const FlatParameters flat(net, optimizers);
  EXPECT_THAT(names_in(flat),
              ElementsAre(ElementsAre("third.bias", "third.weight"), ElementsAre("second.bias", "second.weight"),
                          ElementsAre("first.bias", "first.weight")));
  EXPECT_EQ(flat.buckets()[0].optimizer, 1U);
  EXPECT_EQ(flat.buckets()[1].group, 1U);
}

// A bucket is complete once backward has reached the parameter of it that was registered first.
TEST(FlatParameters, BucketsComeInTheOrderInWhichBackwardFillsThemWhateverTheGroups) {
  for (const bool weights_first : {true, false}) {
    Net net;
    ParamGroup weights{.params = {net.first->weight, net.second->weight, net.third->weight}, .lr = 1.0};
    ParamGroup biases{.params = {net.first->bias, net.second->bias, net.third->bias}};
    std::vector<ParamGroup> groups{biases, weights};
    if (weights_first) std::swap(groups[0], groups[1]);
    const Optimizers optimizers = optim::AdamW(groups, {});
    const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 200, .bucket_cap_bytes = 200});
    EXPECT_THAT(names_in(flat),
                ElementsAre(ElementsAre("third.weight"), ElementsAre("second.weight"),
                            ElementsAre("third.bias", "second.bias", "first.bias"), ElementsAre("first.weight")));
    EXPECT_EQ(flat.buckets()[0].group, weights_first ? 0U : 1U);
  }
}

TEST(FlatParameters, OnlyTheFirstBucketOfBackwardIsSmall) {
  Net net;
  const Optimizers optimizers = optim::AdamW(
      std::vector<ParamGroup>{{.params = net.first->parameters()},
                              {.params = {net.second->weight, net.second->bias, net.third->weight, net.third->bias}}},
      {});
  const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 100, .bucket_cap_bytes = 2000});
  EXPECT_THAT(names_in(flat),
              ElementsAre(ElementsAre("third.bias"), ElementsAre("third.weight", "second.bias", "second.weight"),
                          ElementsAre("first.bias", "first.weight")));
}

TEST(FlatParameters, TiedOnceFrozenNotAtAll) {
  Net net;
  net.register_parameter("tied", net.third->weight);
  net.first->weight.requires_grad_(false);
  const at::Tensor frozen = net.first->weight.detach();
  const Optimizers optimizers = adam(net);
  const FlatParameters flat(net, optimizers);
  int64_t num_elements = 0;
  for (const auto& bucket : flat.buckets()) {
    for (const auto& slot : bucket.slots) num_elements += slot.num_elements;
  }
  EXPECT_EQ(num_elements, 16 + 16 * 16 + 16 + 16 * 3 + 3 + 3);
  EXPECT_TRUE(net.first->weight.is_alias_of(frozen));
  EXPECT_TRUE(flat.contain_all_trainable(optimizers));
  net.first->weight.requires_grad_(true);
  EXPECT_FALSE(flat.contain_all_trainable(optimizers));
}

TEST(FlatParameters, NewcomersGetBucketsOfTheirOwnAndNothingMoves) {
  Net net;
  net.first->weight.requires_grad_(false);
  net.second->weight.requires_grad_(false);
  const Optimizers optimizers = adam(net);
  FlatParameters flat(net, optimizers);
  const auto names_before = names_in(flat);
  const at::Tensor memory = flat.buckets().front().flat;
  net.third->weight.requires_grad_(false);  // stays where it is
  EXPECT_TRUE(flat.contain_all_trainable(optimizers));
  net.first->weight.requires_grad_(true);
  const at::Tensor value = net.first->weight.detach().clone();
  net.second->weight.requires_grad_(true);
  flat.append(net, optimizers, {});
  EXPECT_TRUE(flat.contain_all_trainable(optimizers));
  auto expected = names_before;
  expected.push_back({"second.weight", "first.weight"});
  EXPECT_EQ(names_in(flat), expected);
  EXPECT_TRUE(flat.buckets().front().flat.is_same(memory));
  EXPECT_TRUE(net.first->weight.equal(value));
  EXPECT_TRUE(net.first->weight.is_alias_of(flat.buckets().back().flat));
  flat.check_in_place();
  flat.append(net, optimizers, {});
  EXPECT_EQ(names_in(flat), expected);  // there was nothing to take
}

TEST(FlatParameters, AreMadeAgainInAsManyTurns) {
  Net net;
  net.first->weight.requires_grad_(false);
  net.second->weight.requires_grad_(false);
  const Optimizers optimizers = adam(net);
  FlatParameters::Generations generations{{"unknown", 7}};
  std::vector<std::vector<std::string>> expected;
  {
    FlatParameters flat(net, optimizers);
    net.third->weight.requires_grad_(false);
    for (torch::nn::Linear* thaws : {&net.second, &net.first}) {
      (*thaws)->weight.requires_grad_(true);
      flat.append(net, optimizers, {});
      flat.append(net, optimizers, {});  // there is nothing to take
    }
    expected = names_in(flat);
    for (const auto& bucket : flat.buckets()) {
      for (const auto& slot : bucket.slots) generations[slot.name] = bucket.generation;
    }
  }
  EXPECT_EQ(generations.at("third.weight"), 0);
  EXPECT_EQ(generations.at("second.weight"), 1);
  EXPECT_EQ(generations.at("first.weight"), 2);
  net.third->bias.requires_grad_(false);
  generations.erase("third.bias");  // which is frozen: stays outside
  std::erase(expected.front(), "third.bias");
  FlatParameters again(net, optimizers, {}, generations);
  EXPECT_EQ(names_in(again), expected);
  net.third->bias.requires_grad_(true);
  again.append(net, optimizers, {});
  EXPECT_EQ(again.buckets().back().generation, 3);
}

TEST(FlatParameters, GivesOrdinaryTensorsBack) {
  Net net;
  const Optimizers optimizers = adam(net);
  std::vector<at::Tensor> values;
  {
    const FlatParameters flat(net, optimizers);
    for (const auto& param : net.parameters()) values.push_back(param.detach().clone());
  }
  const auto params = net.parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(params[i].equal(values[i]));
    EXPECT_EQ(params[i].storage().nbytes(), params[i].nbytes());
    EXPECT_TRUE(params[i].is_leaf() && params[i].requires_grad());
  }
}

TEST(FlatParameters, KeepsChannelsLast) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 5, 3));
  conv->to(torch::kFloat);
  conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor before = conv->weight.detach().clone();
  const FlatParameters flat(*conv, adam(*conv));
  EXPECT_TRUE(conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(conv->weight.equal(before));
}

TEST(FlatParameters, NoticesAParameterThatLeft) {
  Net net;
  const FlatParameters flat(net, adam(net));
  flat.check_in_place();
  net.second->to(torch::kDouble);
  net.second->to(torch::kFloat);
  EXPECT_THAT(message_of<c10::Error>([&] { flat.check_in_place(); }), HasSubstr("parameter 'second."));
}

TEST(FlatParameters, AParameterWithoutElementsIsInPlaceBesideOthers) {
  struct WithEmpty : Net {
    WithEmpty() { register_parameter("empty", torch::zeros({0, 3})); }
  };
  WithEmpty net;
  const FlatParameters flat(net, adam(net), {.world_size = 2});
  flat.check_in_place();
}

// The optimizer's state of a parameter is saved by the parameter's name, so that one optimizer alone may have it.
TEST(FlatParameters, RefusesAParameterOfTwoOptimizers) {
  for (const bool frozen : {false, true}) {
    Net net;
    Optimizers optimizers;
    optimizers.add(optim::AdamW(net.parameters(), {}));
    optimizers.add(optim::SGD(net.second->parameters(), {.lr = 1.0}));
    net.second->weight.set_requires_grad(!frozen);
    EXPECT_THAT(message_of<UsageError>([&] { FlatParameters(net, optimizers); }),
                HasSubstr("parameter 'second.weight' is given to two optimizers, number 0 (AdamW) and number 1 (SGD)"));
  }
}

TEST(FlatParameters, RefusesForeignOverlappingAndComplexTensors) {
  Net net;
  const Optimizers foreign = optim::AdamW({torch::ones({2, 3}).requires_grad_()}, {});
  EXPECT_THAT(message_of<UsageError>([&] { FlatParameters(net, foreign); }),
              HasSubstr("AdamW was given a tensor of shape [2, 3] that is not a parameter of the module"));
  net.register_parameter("expanded", torch::ones({1}).expand({4}).detach());
  EXPECT_THAT(message_of<UsageError>([&] { FlatParameters(net, adam(net)); }), HasSubstr("parameter 'expanded'"));
  Net with_complex;
  with_complex.register_parameter("wave", torch::ones({2}, torch::kComplexFloat));
  EXPECT_THAT(message_of<UsageError>([&] { FlatParameters(with_complex, adam(with_complex)); }),
              HasSubstr("parameter 'wave' is complex, which optimizers cannot train; register torch::view_as_real()"));
}

}  // namespace
}  // namespace fulgur
