// A run that resumes in the middle of an epoch goes on with the samples that the uninterrupted run would have read
// next, and with the random numbers that these would have drawn.
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/data/combine.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/sampler.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSize = 24, kEpochs = 2;

// Tiny samples with their index and a random number.
DatasetPtr noisy_samples() {
  const DatasetPtr numbered = TensorDataset::make({{"x", testing::tiny_dataset(kSize)->samples()["x"]},
                                                   {"y", testing::tiny_dataset(kSize)->samples()["y"]},
                                                   {"index", torch::arange(kSize)}});
  return map_samples(numbered, [](const Batch& sample, Random& random) {
    return sample.with("noise", torch::tensor(random.uniform(), at::kDouble));
  });
}

using SampleSeen = std::pair<int64_t, double>;  // index and noise
using BatchSeen = std::vector<SampleSeen>;

struct Watching : testing::TinyModule {
  std::vector<BatchSeen> seen;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    BatchSeen& now = seen.emplace_back();
    for (int64_t i = 0; i < batch.batch_size(); ++i) {
      now.emplace_back(batch["index"][i].item<int64_t>(), batch["noise"][i].item<double>());
    }
    return TinyModule::training_step(batch, batch_idx);
  }
};

class SavesAlways final : public Callback {
 public:
  explicit SavesAlways(fs::path folder) : folder_(std::move(folder)) {}
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t batch_idx) override {
    if (!folder_.empty()) trainer.save_checkpoint(folder_ / c10::str(trainer.state().epoch, "-", batch_idx));
  }

 private:
  fs::path folder_;
};

// What each rank has seen.
std::vector<std::vector<BatchSeen>> fit(int64_t world_size, const DataLoaderOptions& data, const fs::path& saved_in,
                                        const fs::path& checkpoint) {
  std::vector<std::vector<BatchSeen>> seen(static_cast<size_t>(world_size));
  static std::mutex mutex;
  const auto body = [&](int64_t rank) {
    std::shared_ptr<Watching> module;
    {
      const std::lock_guard lock(mutex);
      module = make_module<Watching>();
    }
    TrainerOptions options{.max_epochs = kEpochs,
                           .ckpt_path = checkpoint.string(),
                           .callbacks = {std::make_shared<SavesAlways>(saved_in)}};
    if (world_size > 1) options.devices = world_size;
    Trainer(testing::quiet(options)).fit(module, {.train = DataLoader::make(noisy_samples(), data)});
    seen[static_cast<size_t>(rank)] = module->seen;
  };
  if (world_size == 1) {
    body(0);
  } else {
    testing::run_ranks(world_size, [&](World& world) { body(world.rank()); });
  }
  return seen;
}

std::map<std::string, DataLoaderOptions> every_kind_of_loader() {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < kSize; ++i) lengths.push_back(1 + i % 7);
  const auto similar = std::make_shared<SimilarLengthSampler>(lengths, SimilarLengthSamplerOptions{.max_tokens = 16});
  const auto weighted = std::make_shared<WeightedSampler>(torch::arange(1, kSize + 1));
  return {{"in order", {.batch_size = 3}},
          {"shuffled", {.batch_size = 3, .shuffle = true, .seed = 4}},
          {"by weight", {.batch_size = 3, .sampler = weighted}},
          {"by tokens", {.batch_sampler = similar}}};
}

// What comes after a checkpoint that is called "<epoch>-<batch>".
std::vector<BatchSeen> rest_after(const std::string& checkpoint, const std::vector<BatchSeen>& whole) {
  const int64_t epoch = std::stoll(checkpoint), batch = std::stoll(checkpoint.substr(checkpoint.find('-') + 1));
  return {whole.begin() + epoch * std::ssize(whole) / kEpochs + batch + 1, whole.end()};
}

TEST(DataPosition, EveryInterruptedRunReadsTheRestOfTheSamples) {
  for (auto [name, options] : every_kind_of_loader()) {
    for (const int64_t world_size : {1, 2}) {
      const testing::TempDir dir;
      const auto whole = fit(world_size, options, dir.path(), "");
      int64_t num_resumed = 0;
      for (const int64_t workers : {0, 1, 3}) {
        options.workers = workers;
        for (const auto& checkpoint : fs::directory_iterator(dir.path())) {
          SCOPED_TRACE(c10::str(name, ", ", world_size, " ranks, ", workers, " workers, from ",
                                checkpoint.path().filename().string()));
          const auto resumed = fit(world_size, options, "", checkpoint.path());
          for (size_t rank = 0; rank < whole.size(); ++rank) {
            EXPECT_EQ(resumed[rank], rest_after(checkpoint.path().filename().string(), whole[rank]));
          }
          ++num_resumed;
        }
      }
      EXPECT_EQ(num_resumed, 3 * std::ssize(whole[0]));
    }
  }
}

// 24 samples in batches of 3 on 2 ranks: after n batches 6 n are consumed, and one rank has 24 - 6 n left to read.
TEST(DataPosition, OneRankGoesOnWhereTwoStopped) {
  for (const char* name : {"in order", "shuffled"}) {
    DataLoaderOptions options = every_kind_of_loader().at(name);
    for (const int64_t workers : {0, 3}) {
      options.workers = workers;
      const testing::TempDir dir;
      const auto before = fit(2, options, dir.path(), "");
      for (int64_t batches = 1; batches <= 3; ++batches) {
        SCOPED_TRACE(c10::str(name, ", ", workers, " workers, after ", batches, " batches"));
        const auto after = fit(1, options, "", dir.path() / c10::str("0-", batches - 1));
        BatchSeen first_epoch;
        for (const auto& rank : before) {
          for (int64_t i = 0; i < batches; ++i)
            std::ranges::copy(rank[static_cast<size_t>(i)], std::back_inserter(first_epoch));
        }
        const int64_t left = (kSize - 6 * batches) / 3;
        for (int64_t i = 0; i < left; ++i)
          std::ranges::copy(after[0][static_cast<size_t>(i)], std::back_inserter(first_epoch));
        std::ranges::sort(first_epoch);
        BatchSeen expected;
        for (int64_t i = 0; i < kSize; ++i) {
          expected.emplace_back(i, SampleRandom({.seed = options.seed, .epoch = 0}).of(i).uniform());
        }
        EXPECT_EQ(first_epoch, expected);
        EXPECT_EQ(std::ssize(after[0]), left + kSize / 3);
      }
    }
  }
}

// The batch size is another one: the same number of samples for all ranks together, twice as many, and fewer.
TEST(DataPosition, OtherBatchesGoOnWithTheRestOfTheEpoch) {
  const testing::TempDir dir;
  DataLoaderOptions options = every_kind_of_loader().at("shuffled");
  const auto before = fit(2, options, dir.path(), "");
  for (const int64_t world_size : {1, 2}) {
    for (const int64_t batch_size : {2, 4, 6}) {
      for (int64_t batches = 1; batches <= 3; ++batches) {
        SCOPED_TRACE(c10::str(world_size, " ranks, batches of ", batch_size, ", after ", batches));
        options.batch_size = batch_size;
        const auto after = fit(world_size, options, "", dir.path() / c10::str("0-", batches - 1));
        std::vector<int64_t> seen;
        for (const auto& rank : before) {
          for (int64_t i = 0; i < batches; ++i) {
            for (const auto& [index, noise] : rank[static_cast<size_t>(i)]) seen.push_back(index);
          }
        }
        const int64_t left = kSize - 6 * batches, in_batch = world_size * batch_size;
        for (const auto& rank : after) {
          for (int64_t i = 0; i < (left + in_batch - 1) / in_batch; ++i) {
            for (const auto& [index, noise] : rank[static_cast<size_t>(i)]) seen.push_back(index);
          }
          EXPECT_EQ(std::ssize(rank), (left + in_batch - 1) / in_batch + (kSize + in_batch - 1) / in_batch);
        }
        std::ranges::sort(seen);
        seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
        EXPECT_EQ(std::ssize(seen), kSize);
      }
    }
  }
}

}  // namespace
}  // namespace fulgur
