#include "fulgur/core/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;

Batch images(int64_t size) {
  return {{"image", torch::arange(size * 3).view({size, 3})},
          {"label", torch::arange(size)},
          {"scale", torch::tensor(2.0)}};
}

template <class Index>
concept IndexesBatch = requires(const Batch& batch, Index index) { batch[index]; };

static_assert(IndexesBatch<const char*> && IndexesBatch<std::string>);
static_assert(!IndexesBatch<int> && !IndexesBatch<std::nullptr_t>);

TEST(Batch, KeepsNamesAndOrder) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : images(2)) names.push_back(name);
  EXPECT_THAT(names, ::testing::ElementsAre("image", "label", "scale"));
}

TEST(Batch, SizeIsDim0OfTheTensorsThatHaveOne) { EXPECT_EQ(images(5).batch_size(), 5); }

TEST(Batch, RefusesDifferentSizesByName) {
  const Batch batch{{"image", torch::zeros({4, 2})}, {"label", torch::zeros({3})}};
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { batch.batch_size(); }),
              HasSubstr("'image' has 4, 'label' has 3"));
}

TEST(Batch, UnknownNameSaysTheNearest) {
  EXPECT_THAT(testing::message_of<c10::IndexError>([] { images(2)["lable"]; }), HasSubstr("did you mean 'label'?"));
}

TEST(Batch, RefusesANameTwiceAndAnUndefinedTensor) {
  EXPECT_THROW((Batch{{"x", torch::zeros(1)}, {"x", torch::zeros(1)}}), c10::ValueError);
  EXPECT_THROW((Batch{{"x", at::Tensor()}}), c10::ValueError);
}

TEST(Batch, WithGivesANewBatchWithThatTensor) {
  const Batch batch{{"x", torch::zeros(2)}, {"y", torch::ones(2)}};
  const Batch replaced = batch.with("x", torch::full({2}, 5.0));
  EXPECT_EQ(replaced.begin()->first, "x");
  EXPECT_EQ(replaced["x"][0].item<double>(), 5.0);
  EXPECT_TRUE(replaced["y"].is_same(batch["y"]));
  EXPECT_EQ(batch["x"][0].item<double>(), 0.0);
  const Batch longer = batch.with("mask", torch::ones(2));
  EXPECT_EQ(longer.size(), 3U);
  EXPECT_EQ((longer.end() - 1)->first, "mask");
  EXPECT_EQ(batch.size(), 2U);
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { batch.with("x", {}); }),
              HasSubstr("the tensor 'x' of a Batch is undefined"));
}

TEST(Batch, SplitsIntoViewsAndRepeatsScalars) {
  const Batch whole = images(5);
  const auto parts = whole.split(2);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].batch_size(), 3);
  EXPECT_EQ(parts[1].batch_size(), 2);
  EXPECT_TRUE(parts[1]["label"].equal(torch::tensor({3, 4})));
  EXPECT_TRUE(parts[1]["label"].is_alias_of(whole["label"]));
  EXPECT_EQ(parts[1]["scale"].item<double>(), 2.0);
}

TEST(Batch, SplitOfFewSamplesHasFewerParts) { EXPECT_EQ(images(2).split(4).size(), 2U); }

TEST(Batch, ToTheSameDeviceSharesTheTensors) {
  const Batch batch = images(2);
  EXPECT_TRUE(batch.to(c10::kCPU)["image"].is_same(batch["image"]));
}

TEST(Batch, PinsOnlyWhatIsInOrdinaryMemory) {
  const Batch elsewhere{{"x", torch::zeros({2}, at::kMeta)}, {"indices", torch::eye(3).to_sparse()}};
  EXPECT_TRUE(elsewhere.pin()["x"].is_same(elsewhere["x"]));
  EXPECT_TRUE(elsewhere.pin()["indices"].is_same(elsewhere["indices"]));
}

}  // namespace
}  // namespace fulgur
