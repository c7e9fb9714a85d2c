#include "fulgur/data/data_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "fulgur/base/error.h"
#include "fulgur/data/tensor_dataset.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

std::shared_ptr<TensorDataset> numbers(int64_t size) {
  return TensorDataset::make({{"x", torch::arange(size)}, {"square", torch::arange(size).square().unsqueeze(1)}});
}

// A dataset that makes its samples one by one.
struct Counted : Dataset {
  int64_t size() const override { return 5; }
  Batch get(int64_t index, Random&) const override {
    return {{"x", torch::full({2}, index)}, {"label", torch::tensor(index)}};
  }
};

std::vector<std::vector<int64_t>> epoch_of(DataLoader& loader, int64_t epoch) {
  std::vector<std::vector<int64_t>> batches;
  loader.begin_epoch(epoch);
  while (const auto batch = loader.next()) {
    const at::Tensor x = (*batch)["x"];
    batches.emplace_back(x.data_ptr<int64_t>(), x.data_ptr<int64_t>() + x.numel());
  }
  return batches;
}

TEST(DataLoader, CutsInOrderAndKeepsTheShortLastBatch) {
  DataLoader loader(numbers(5), {.batch_size = 2});
  EXPECT_EQ(loader.num_batches(), 3);
  EXPECT_THAT(epoch_of(loader, 0), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4)));
}

TEST(DataLoader, DropsTheShortLastBatchIfAsked) {
  DataLoader loader(numbers(5), {.batch_size = 2, .drop_last = true});
  EXPECT_EQ(loader.num_batches(), 2);
  EXPECT_EQ(epoch_of(loader, 0).size(), 2U);
}

TEST(DataLoader, ShufflesByEpochAndCanBeRepeated) {
  DataLoader loader(numbers(50), {.batch_size = 50, .shuffle = true, .seed = 1});
  const auto first = epoch_of(loader, 0);
  EXPECT_NE(first, epoch_of(loader, 1));
  EXPECT_EQ(first, epoch_of(loader, 0));
}

TEST(DataLoader, TensorsOfABatchBelongTogether) {
  DataLoader loader(numbers(20), {.batch_size = 20, .shuffle = true, .seed = 1});
  loader.begin_epoch(0);
  const Batch batch = loader.next().value();
  EXPECT_TRUE(batch["square"].squeeze(1).equal(batch["x"].square()));
}

TEST(DataLoader, StacksSamplesOfADatasetThatGivesThemOneByOne) {
  DataLoader loader(std::make_shared<Counted>(), {.batch_size = 3});
  loader.begin_epoch(0);
  const Batch batch = loader.next().value();
  EXPECT_TRUE(batch["x"].equal(torch::tensor({{0, 0}, {1, 1}, {2, 2}})));
  EXPECT_TRUE(batch["label"].equal(torch::tensor({0, 1, 2})));
}

struct Ragged : Counted {
  Batch get(int64_t index, Random&) const override { return {{"x", torch::zeros({index + 1})}}; }
};

TEST(DataLoader, RefusesSamplesOfDifferentShapes) {
  DataLoader loader(std::make_shared<Ragged>(), {.batch_size = 3});
  loader.begin_epoch(0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { loader.next(); }), HasSubstr("the shape of 'x': [1] and [2]"));
}

TEST(DataLoader, RefusesBadOptions) {
  EXPECT_THAT(message_of<UsageError>([] { DataLoader loader(numbers(5), {.batch_size = 0}); }), HasSubstr("got 0"));
  EXPECT_THAT(message_of<UsageError>([] { DataLoader loader(nullptr, {}); }), HasSubstr("null"));
  const auto sampler = std::make_shared<SequentialSampler>(5);
  EXPECT_THAT(message_of<UsageError>([&] { DataLoader loader(numbers(5), {.shuffle = true, .sampler = sampler}); }),
              HasSubstr("leave one of them out"));
}

TEST(TensorDataset, RefusesDifferentSizesAndScalars) {
  EXPECT_THROW(TensorDataset({{"x", torch::zeros(3)}, {"y", torch::zeros(4)}}), c10::ValueError);
  EXPECT_THROW(TensorDataset({{"x", torch::zeros(3)}, {"y", torch::tensor(1.0)}}), c10::ValueError);
}

TEST(RandomSplit, PartsAreDisjointAndWhole) {
  const auto parts = random_split(*numbers(10), {7, 2, 1}, 3);
  const auto all = torch::cat({parts[0]->samples()["x"], parts[1]->samples()["x"], parts[2]->samples()["x"]});
  EXPECT_TRUE(std::get<0>(all.sort()).equal(torch::arange(10)));
  EXPECT_TRUE(parts[0]->samples()["x"].equal(random_split(*numbers(10), {7, 3}, 3)[0]->samples()["x"]));
}

TEST(RandomSplit, RefusesSizesThatDoNotAddUp) {
  EXPECT_THAT(message_of<c10::ValueError>([] { random_split(*numbers(10), {7, 2}, 3); }), HasSubstr("add up to 9"));
}

}  // namespace
}  // namespace fulgur
