#include "fulgur/data/combine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tensor_dataset.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

DatasetPtr numbers(int64_t begin, int64_t end) { return TensorDataset::make({{"x", torch::arange(begin, end)}}); }

std::vector<int64_t> contents(const DatasetPtr& dataset) {
  std::vector<int64_t> values;
  Random random(0);
  for (int64_t i = 0; i < dataset->size(); ++i) values.push_back(dataset->get(i, random)["x"].item<int64_t>());
  return values;
}

std::vector<int64_t> batched_contents(const DatasetPtr& dataset) {
  DataLoader loader(dataset, {.batch_size = 100});
  loader.begin_epoch(0);
  const at::Tensor x = loader.next().value()["x"];
  return {x.data_ptr<int64_t>(), x.data_ptr<int64_t>() + x.numel()};
}

// Counts how often its samples are read.
struct Counting final : Dataset {
  mutable std::atomic<int> reads = 0;
  int64_t size() const override { return 4; }
  Batch get(int64_t index, Random& random) const override {
    ++reads;
    return {{"x", torch::tensor(index)}, {"noise", torch::tensor(random.uniform())}};
  }
};

TEST(MapSamples, ChangesEachWithItsRandom) {
  const auto noisy = map_samples(numbers(0, 3), [](const Batch& sample, Random& random) {
    return sample.with("x", sample["x"] * 10).with("noise", torch::tensor(random.uniform(), at::kDouble));
  });
  EXPECT_THAT(contents(noisy), ElementsAre(0, 10, 20));
  DataLoader loader(noisy, {.batch_size = 3, .seed = 7});
  loader.begin_epoch(2);
  const at::Tensor noise = loader.next().value()["noise"];
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(noise[i].item<double>(), SampleRandom({.seed = 7, .epoch = 2}).of(i).uniform());
  }
}

TEST(Subset, HasTheGivenSamplesInTheirOrder) {
  const auto part = subset(numbers(10, 20), {7, 0, 7});
  EXPECT_THAT(contents(part), ElementsAre(17, 10, 17));
  EXPECT_THAT(batched_contents(part), ElementsAre(17, 10, 17));
  EXPECT_EQ(message_of<UsageError>([] { subset(numbers(0, 3), {0, 3}); }),
            "subset: TensorDataset has 3 samples, and none with the index 3");
}

TEST(FilterSamples, KeepsWhatIsAccepted) {
  const auto odd = filter_samples(numbers(0, 7), [](const Batch& s) { return s["x"].item<int64_t>() % 2 == 1; });
  EXPECT_THAT(contents(odd), ElementsAre(1, 3, 5));
}

TEST(Split, PutsEverySampleIntoOnePart) {
  const auto parts = split(numbers(0, 10), {0.7, 0.2, 0.1}, 1);
  std::vector<int64_t> all;
  for (const auto& part : parts) std::ranges::copy(contents(part), std::back_inserter(all));
  EXPECT_THAT((std::vector{parts[0]->size(), parts[1]->size(), parts[2]->size()}), ElementsAre(7, 2, 1));
  EXPECT_FALSE(std::ranges::is_sorted(all));
  std::ranges::sort(all);
  EXPECT_THAT(all, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(contents(parts[0]), contents(split(numbers(0, 10), {0.7, 0.3}, 1)[0]));
}

TEST(Split, TheLastPartGetsTheRestOfFractionsThatWereRounded) {
  const auto parts = split(numbers(0, 1'000'000), {0.3333331, 0.3333331, 0.3333331}, 1);
  EXPECT_EQ(parts[0]->size() + parts[1]->size() + parts[2]->size(), 1'000'000);
}

TEST(Split, RefusesFractionsThatDoNotAddUpAndEmptyParts) {
  EXPECT_EQ(message_of<UsageError>([] { split(numbers(0, 9), {0.7, 0.2}, 1); }),
            "split: the fractions add up to 0.9, not to 1");
  EXPECT_EQ(message_of<UsageError>([] { split(numbers(0, 9), {0.99, 0.01}, 1); }),
            "split: a part of 0.01 of 9 samples has none");
}

TEST(Concatenate, HasOneAfterTheOther) {
  const auto all = concatenate({numbers(0, 2), numbers(0, 0), numbers(5, 8)});
  EXPECT_THAT(contents(all), ElementsAre(0, 1, 5, 6, 7));
  EXPECT_EQ(all->name(), "TensorDataset + TensorDataset + TensorDataset");
}

// After n samples each part has given its share of n, to within one sample.
TEST(Mix, FollowsTheWeightsFromTheFirstSampleOn) {
  const auto mixed = mix({{numbers(0, 100), 0.5}, {numbers(100, 103), 0.3}, {numbers(200, 300), 0.2}}, 200);
  auto values = contents(mixed);
  ASSERT_EQ(values.size(), 200U);
  std::array<double, 3> given{};
  for (size_t i = 0; i < values.size(); ++i) {
    ++given[values[i] < 100 ? 0 : values[i] < 200 ? 1 : 2];
    for (size_t part = 0; part < 3; ++part) {
      EXPECT_LE(std::abs(given[part] - std::array{0.5, 0.3, 0.2}[part] * static_cast<double>(i + 1)), 1.0);
    }
  }
  std::erase_if(values, [](int64_t value) { return value < 100 || value >= 200; });
  EXPECT_EQ(values[0], 100);
  EXPECT_EQ(values[3], 100) << "a part that is read to its end starts over";
}

TEST(Mix, RefusesBadWeightsAndEmptyParts) {
  EXPECT_EQ(message_of<UsageError>([] { mix({{numbers(0, 2), -1.0}}, 5); }), "mix: -1 is no weight");
  EXPECT_EQ(message_of<UsageError>([] { mix({{numbers(0, 2), 0.0}}, 5); }),
            "mix: give a dataset with a weight above 0");
  EXPECT_EQ(message_of<UsageError>([] { mix({{numbers(0, 0), 1.0}}, 5); }), "mix: TensorDataset has no samples to mix");
}

TEST(CacheInMemory, ReadsEachSampleOnceUpToItsLimit) {
  const auto counting = std::make_shared<Counting>();
  const auto cached = cache_in_memory(counting);
  const auto first = contents(cached);
  EXPECT_EQ(contents(cached), first);
  EXPECT_EQ(counting->reads, 4);
  const auto small = cache_in_memory(counting, /*max_bytes=*/32);  // two samples of 16 bytes
  contents(small);
  contents(small);
  EXPECT_EQ(counting->reads, 4 + 4 + 2);
}

// Each sample is part of a larger tensor, and has a small tensor before a large one.
struct Parts final : Dataset {
  int64_t size() const override { return 3; }
  Batch get(int64_t index, Random&) const override {
    const at::Tensor large = torch::arange(1000, at::kLong);
    return {{"label", large.narrow(0, index, 1).to(at::kByte)}, {"values", large.narrow(0, index, 4)}};
  }
};

TEST(CacheInMemory, KeepsNoMoreThanTheSamples) {
  const auto cached = cache_in_memory(std::make_shared<Parts>());
  Random random(0);
  cached->get(1, random);
  const Batch kept = cached->get(1, random);
  EXPECT_TRUE(kept["values"].equal(torch::arange(1, 5, at::kLong)));
  EXPECT_EQ(kept["values"].storage().nbytes(), 4 * sizeof(int64_t));
}

TEST(CacheOnDisk, KeepsTheOrderOfTensors) {
  const TempDir dir;
  const auto cached = cache_on_disk(std::make_shared<Parts>(), dir.path() / "cache");
  Random random(0);
  for (int reads = 0; reads < 2; ++reads) EXPECT_EQ(cached->get(0, random).begin()->first, "label") << reads;
}

TEST(CacheOnDisk, KeepsSamplesForLaterRuns) {
  const TempDir dir;
  const auto counting = std::make_shared<Counting>();
  const auto first = contents(cache_on_disk(counting, dir.path() / "cache"));
  const auto again = cache_on_disk(counting, dir.path() / "cache");
  EXPECT_EQ(contents(again), first);
  EXPECT_EQ(counting->reads, 4);
  Random random(0);
  EXPECT_EQ(again->get(2, random)["noise"].scalar_type(), at::kFloat);
  EXPECT_THAT(
      message_of<CheckpointError>([&] { cache_on_disk(numbers(0, 3), dir.path() / "cache"); }),
      HasSubstr("keeps samples of another dataset:\nCounting\n4 samples\ndigest ''\nThis one is:\nTensorDataset\n"));
}

TEST(CacheOnDisk, SeveralThreadsMayReadTheSameSample) {
  const TempDir dir;
  const auto cached = cache_on_disk(std::make_shared<Counting>(), dir.path() / "cache");
  std::vector<std::thread> threads;
  std::atomic<int> failures = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      try {
        contents(cached);
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

// Multiplies by a factor that its digest does not have.
struct Multiplied final : Dataset {
  explicit Multiplied(int64_t by) : factor(by) {}
  int64_t factor;
  int64_t size() const override { return 2; }
  Batch get(int64_t index, Random&) const override { return {{"x", torch::tensor(index * factor)}}; }
  std::string sample_options() const override { return std::to_string(factor); }
};

TEST(CacheOnDisk, TellsOptionsOfADatasetWithinOthersApart) {
  const TempDir dir;
  const auto cached = [&](int64_t factor) {
    return cache_on_disk(
        cache_in_memory(concatenate({numbers(0, 1), mix({{std::make_shared<Multiplied>(factor), 1.0}}, 2)})),
        dir.path() / "cache");
  };
  EXPECT_THAT(contents(cached(3)), ElementsAre(0, 0, 3));
  EXPECT_THAT(contents(cached(3)), ElementsAre(0, 0, 3));
  EXPECT_THAT(message_of<CheckpointError>([&] { cached(4); }), HasSubstr("options '; 4'"));
}

TEST(CacheOnDisk, TellsTheHalvesOfADatasetApart) {
  const TempDir dir;
  const auto halves = split(numbers(0, 10), {0.5, 0.5}, 1);
  contents(cache_on_disk(halves[0], dir.path() / "cache"));
  EXPECT_THROW(cache_on_disk(halves[1], dir.path() / "cache"), CheckpointError);
}

}  // namespace
}  // namespace fulgur
