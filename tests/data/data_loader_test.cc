#include "fulgur/data/data_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <iterator>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/data/collate.h"
#include "fulgur/data/combine.h"
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

// Samples that say which epoch's Random they were read with.
struct Noisy : Dataset {
  explicit Noisy(int64_t num_samples = 23) : size_(num_samples) {}
  int64_t size() const override { return size_; }
  Batch get(int64_t index, Random& random) const override {
    return {{"x", torch::tensor(index)},
            {"noise", torch::tensor(static_cast<double>(random.bits() >> 11), at::kDouble)}};
  }
  std::string digest() const override { return digest_; }
  int64_t size_;
  std::string digest_{};
};

// All that is left of an epoch, as text.
std::vector<std::string> rest_of(Loader& loader) {
  std::vector<std::string> batches;
  while (const auto batch = loader.next()) {
    std::string text;
    for (const auto& [name, tensor] : *batch) text += name + c10::str(tensor) + "\n";
    batches.push_back(text);
  }
  return batches;
}

std::vector<std::string> whole_epoch(Loader& loader, int64_t epoch) {
  loader.begin_epoch(epoch);
  return rest_of(loader);
}

TEST(Workers, GiveTheBatchesThatOneThreadGives) {
  const DataLoaderOptions options{.batch_size = 4, .shuffle = true, .seed = 5};
  DataLoader alone(std::make_shared<Noisy>(), options);
  for (const int64_t workers : {1, 2, 3}) {
    for (const int64_t prefetch : {1, 2, 5}) {
      DataLoaderOptions ahead = options;
      ahead.workers = workers;
      ahead.prefetch_batches = prefetch;
      DataLoader loader(std::make_shared<Noisy>(), ahead);
      for (const int64_t epoch : {0, 1, 0}) EXPECT_EQ(whole_epoch(loader, epoch), whole_epoch(alone, epoch));
    }
  }
}

// Counts the samples that were read.
struct Watched final : Dataset {
  mutable std::atomic<int64_t> reads = 0;
  int64_t size() const override { return 1000; }
  Batch get(int64_t index, Random&) const override {
    ++reads;
    reads.notify_all();
    return {{"x", torch::tensor(index)}};
  }
};

// Two workers may have 2 x 3 batches of 5 ready. They read that many; a moment later, still that many.
TEST(Workers, ReadAsFarAheadAsTheyMayAndNoFurther) {
  const auto watched = std::make_shared<Watched>();
  DataLoader loader(watched, {.batch_size = 5, .workers = 2, .prefetch_batches = 3});
  loader.begin_epoch(0);
  for (int64_t taken = 1; taken <= 3; ++taken) {
    loader.next();
    const int64_t allowed = (taken + 2 * 3) * 5;
    for (int64_t reads = watched->reads; reads < allowed; reads = watched->reads) watched->reads.wait(reads);
    std::this_thread::yield();
    EXPECT_EQ(watched->reads, allowed);
  }
  loader.begin_epoch(1);
  EXPECT_EQ(loader.next().value()["x"][0].item<int64_t>(), 0);
}

TEST(Workers, EndWithTheLoaderInTheMiddleOfAnEpoch) {
  const auto watched = std::make_shared<Watched>();
  {
    DataLoader loader(watched, {.batch_size = 5, .workers = 3});
    loader.begin_epoch(0);
    loader.next();
  }
  EXPECT_EQ(watched.use_count(), 1) << "no thread keeps the dataset";
}

struct Broken final : Dataset {
  int64_t size() const override { return 24; }
  Batch get(int64_t index, Random&) const override {
    if (index == 17) throw std::runtime_error("row 17 has 3 columns instead of 4");
    return {{"x", torch::tensor(index)}};
  }
};

TEST(Workers, AnErrorComesInItsTurnAndNamesTheSample) {
  for (const int64_t workers : {0, 1, 3}) {
    const auto broken = std::make_shared<Broken>();
    DataLoader loader(broken, {.batch_size = 4, .workers = workers});
    loader.begin_epoch(0);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(loader.next());
    std::exception_ptr error;
    try {
      loader.next();
    } catch (const std::runtime_error&) {
      error = std::current_exception();
    }
    EXPECT_EQ(text_of(error), "sample 17 of Broken: row 17 has 3 columns instead of 4");
    error = nullptr;
    EXPECT_THROW(loader.next(), std::runtime_error) << "no batch is left out";
    loader.begin_epoch(0);
    EXPECT_TRUE(loader.next());
  }
}

struct DrawsGlobally final : Dataset {
  int64_t size() const override { return 24; }
  Batch get(int64_t, Random&) const override { return {{"x", torch::rand({2})}}; }
};

TEST(Workers, ADatasetThatDrawsFromTheGlobalGeneratorIsNamed) {
  DataLoader loader(std::make_shared<DrawsGlobally>(), {.batch_size = 4, .workers = 2});
  loader.begin_epoch(0);
  EXPECT_THAT(message_of<DataError>([&] { loader.next(); }),
              HasSubstr("DrawsGlobally drew from torch's global generator in a worker"));
  DataLoader alone(std::make_shared<DrawsGlobally>(), {.batch_size = 4});
  alone.begin_epoch(0);
  EXPECT_TRUE(alone.next()) << "without workers the numbers can be repeated";
}

// Reads one sample until the test lets it go on.
struct Hangs final : Dataset {
  explicit Hangs(int64_t given) : sample(given) {}
  int64_t sample;
  mutable std::promise<void> is_reading;
  std::shared_ptr<std::promise<void>> let_go = std::make_shared<std::promise<void>>();
  std::shared_future<void> may_go = let_go->get_future().share();
  int64_t size() const override { return 24; }
  Batch get(int64_t index, Random&) const override {
    if (index == sample) {
      is_reading.set_value();
      may_go.wait();
    }
    return {{"x", torch::tensor(index)}};
  }
};

TEST(Workers, AWorkerThatHangsEndsTheRun) {
  const auto hangs = std::make_shared<Hangs>(0);
  {
    DataLoader loader(hangs, {.batch_size = 4, .workers = 1, .timeout_s = 0.2});
    loader.begin_epoch(0);
    EXPECT_EQ(message_of<DataError>([&] { loader.next(); }),
              "a worker has read a batch of Hangs for more than 0.2 s (timeout_s)");
  }
  hangs->let_go->set_value();
}

TEST(Workers, AWorkerThatHangsIsNotWaitedForByTheDestructor) {
  const auto hangs = std::make_shared<Hangs>(8);
  {
    DataLoader loader(hangs, {.batch_size = 4, .workers = 2, .timeout_s = 1});
    loader.begin_epoch(0);
    loader.next();  // the third batch is read ahead
    hangs->is_reading.get_future().wait();
  }
  hangs->let_go->set_value();
}

TEST(Workers, AreReadFromText) {
  EXPECT_EQ(Workers("auto").to_string(), "auto");
  EXPECT_EQ(Workers("3").count(1), 3);
  EXPECT_EQ(Workers("auto").count(/*num_cores=*/8), 7);
  EXPECT_EQ(Workers("auto").count(/*num_cores=*/1), 0) << "the only core is the step's";
  EXPECT_EQ(message_of<UsageError>([] { Workers("many"); }),
            "'many' is no number of workers; write 0, 1, 2, ... or auto");
  EXPECT_EQ(message_of<UsageError>([] { Workers("-1"); }), "'-1' is no number of workers; write 0, 1, 2, ... or auto");
  EXPECT_EQ(message_of<UsageError>([] { Workers(-1); }), "'-1' is no number of workers; write 0, 1, 2, ... or auto");
}

// The loaders that a position is tried with.
std::vector<DataLoaderOptions> loaders_with_a_position(int64_t size) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < size; ++i) lengths.push_back(1 + i % 7);
  std::vector<DataLoaderOptions> all;
  for (const int64_t workers : {0, 1, 3}) {
    all.push_back({.batch_size = 3, .seed = 4, .workers = workers});
    all.push_back({.batch_size = 3, .shuffle = true, .seed = 4, .workers = workers});
    all.push_back({.batch_size = 3, .shuffle = true, .seed = 4, .drop_last = true, .workers = workers});
    all.push_back({.batch_size = 3,
                   .workers = workers,
                   .sampler = std::make_shared<WeightedSampler>(torch::arange(1, size + 1))});
    all.push_back({.workers = workers,
                   .batch_sampler =
                       std::make_shared<SimilarLengthSampler>(lengths, SimilarLengthSamplerOptions{.max_tokens = 14})});
  }
  return all;
}

TEST(Position, GoesOnAtEveryBatchOfEverySampler) {
  for (const DataLoaderOptions& options : loaders_with_a_position(23)) {
    DataLoader whole(std::make_shared<Noisy>(), options);
    const auto expected = whole_epoch(whole, 1);
    whole.begin_epoch(1);
    for (size_t batch = 0; batch <= expected.size(); ++batch) {
      const State position = whole.position();
      DataLoader resumed(std::make_shared<Noisy>(), options);
      resumed.begin_epoch(1);
      resumed.go_to(position);
      EXPECT_EQ(rest_of(resumed), std::vector(expected.begin() + static_cast<int64_t>(batch), expected.end()));
      whole.next();
    }
  }
}

std::vector<int64_t> samples_of(const Batch& batch) {
  const at::Tensor x = batch["x"];
  return {x.data_ptr<int64_t>(), x.data_ptr<int64_t>() + x.numel()};
}

// Each sample comes once, when some ranks read a part of the epoch and others the rest. Where the rest does not divide
// evenly, as many of the first ones come again as let all ranks have equally much.
TEST(Position, OtherRanksGoOnWithTheRest) {
  constexpr int64_t kSize = 24, kLargestBatch = 14;
  for (const DataLoaderOptions& options : loaders_with_a_position(kSize)) {
    if (options.drop_last || options.sampler) continue;  // leave samples out, or draw some twice
    for (const int64_t before : {1, 2, 3}) {
      for (const int64_t after : {1, 2, 3}) {
        std::vector<int64_t> all;
        State position;
        for (int64_t rank = 0; rank < before; ++rank) {
          DataLoader loader(std::make_shared<Noisy>(kSize), options);
          loader.set_shard({.rank = rank, .world_size = before, .even = true});
          loader.begin_epoch(0);
          for (int i = 0; i < 2; ++i) std::ranges::copy(samples_of(loader.next().value()), std::back_inserter(all));
          position = loader.position();
        }
        for (int64_t rank = 0; rank < after; ++rank) {
          DataLoader loader(std::make_shared<Noisy>(kSize), options);
          loader.set_shard({.rank = rank, .world_size = after, .even = true});
          loader.begin_epoch(0);
          loader.go_to(position);
          while (const auto batch = loader.next()) std::ranges::copy(samples_of(*batch), std::back_inserter(all));
        }
        EXPECT_EQ(std::set(all.begin(), all.end()).size(), kSize) << before << " ranks, then " << after;
        EXPECT_LE(std::ssize(all), kSize + (after - 1) * (options.batch_sampler ? kLargestBatch : 1));
      }
    }
  }
}

std::vector<int64_t> indices_from(int64_t begin) {
  std::vector<int64_t> indices(23);
  std::iota(indices.begin(), indices.end(), begin);
  return indices;
}

TEST(Position, OfOtherDataIsRefused) {
  DataLoader loader(std::make_shared<Noisy>(23), {.batch_size = 3});
  loader.begin_epoch(0);
  loader.next();
  DataLoader larger(std::make_shared<Noisy>(40), {.batch_size = 3});
  larger.begin_epoch(0);
  EXPECT_EQ(message_of<CheckpointError>([&] { larger.go_to(loader.position()); }),
            "the checkpoint is in the middle of an epoch over 23 samples, but Noisy has 40; resume with the same data, "
            "or from a checkpoint at the end of an epoch");
  const auto named = [](std::string digest) {
    const auto dataset = std::make_shared<Noisy>(23);
    dataset->digest_ = std::move(digest);
    return dataset;
  };
  DataLoader first(named("a"), {.batch_size = 3}), second(named("b"), {.batch_size = 3});
  first.begin_epoch(0);
  second.begin_epoch(0);
  EXPECT_THAT(message_of<CheckpointError>([&] { second.go_to(first.position()); }),
              HasSubstr("Noisy has 23, and others (its digest is another one)"));
  DataLoader few(subset(std::make_shared<Noisy>(46), indices_from(0)), {.batch_size = 3});
  DataLoader others(subset(std::make_shared<Noisy>(46), indices_from(23)), {.batch_size = 3});
  few.begin_epoch(0);
  others.begin_epoch(0);
  EXPECT_THAT(message_of<CheckpointError>([&] { others.go_to(few.position()); }),
              HasSubstr("its digest is another one"));
  DataLoader by_batches({std::make_shared<Noisy>(2)},
                        {.batch_sampler = std::make_shared<SimilarLengthSampler>(
                             std::vector<int64_t>{1, 2}, SimilarLengthSamplerOptions{.batch_size = 1})});
  State position;
  position.set("samples", int64_t{1});
  position.set("of", int64_t{2});
  position.set("size", int64_t{2});
  EXPECT_THAT(message_of<CheckpointError>([&] { by_batches.go_to(position); }),
              HasSubstr("no place among the 2 batches"));
}

// Sorts in the first epoch, then shuffles, and counts how often it is asked.
struct SortedFirst final : Sampler {
  SortedFirst(int64_t count, uint64_t seed) : shuffled(count, seed) {}
  at::Tensor indices(int64_t epoch) const override {
    ++calls;
    return epoch == 0 ? torch::arange(shuffled.size()) : shuffled.indices(epoch);
  }
  int64_t size() const override { return shuffled.size(); }
  RandomSampler shuffled;
  mutable int calls = 0;
};

TEST(Position, InAnotherOrderIsRefusedAlsoInALaterPass) {
  const auto loader = [](uint64_t seed, int64_t workers) {
    auto made = DataLoader::make(
        numbers(10),
        {.batch_size = 2, .workers = workers, .infinite = true, .sampler = std::make_shared<SortedFirst>(10, seed)});
    made->begin_epoch(0);
    return made;
  };
  for (const int64_t workers : {0, 2}) {
    const auto first = loader(1, workers), same = loader(1, workers), other = loader(2, workers);
    first->next();
    other->go_to(first->position());  // the orders of the first pass are equal
    for (int batch = 1; batch < 6; ++batch) first->next();
    const State position = first->position();  // a batch into the second pass
    same->go_to(position);
    EXPECT_EQ(samples_of(same->next().value()), samples_of(first->next().value()));
    EXPECT_THAT(message_of<CheckpointError>([&] { other->go_to(position); }), HasSubstr("in another order"));
  }
}

TEST(Position, OfBatchesInAnotherOrderOrCutIsRefused) {
  const auto loader = [](SimilarLengthSamplerOptions options) {
    const std::vector<int64_t> lengths(12, 5);
    auto made =
        DataLoader::make(numbers(12), {.batch_sampler = std::make_shared<SimilarLengthSampler>(lengths, options)});
    made->begin_epoch(0);
    return made;
  };
  const auto first = loader({.batch_size = 3, .seed = 1});
  first->next();
  loader({.batch_size = 3, .seed = 1})->go_to(first->position());
  EXPECT_THAT(message_of<CheckpointError>([&] { loader({.batch_size = 3, .seed = 2})->go_to(first->position()); }),
              HasSubstr("in another order"));
}

TEST(Position, AsksTheSamplerForNoOrderMoreThanOnce) {
  const auto sampler = std::make_shared<SortedFirst>(10, 1);
  DataLoader loader(numbers(10), {.batch_size = 2, .sampler = sampler});
  loader.begin_epoch(1);
  do loader.position();
  while (loader.next());
  loader.position();
  EXPECT_EQ(sampler->calls, 1);
}

TEST(Position, OfAnEarlierVersionHasNoOrder) {
  DataLoader first(numbers(10), {.batch_size = 2, .shuffle = true, .seed = 1});
  first.begin_epoch(0);
  first.next();
  State position = first.position();
  position.erase("order");
  DataLoader other(numbers(10), {.batch_size = 2, .shuffle = true, .seed = 2});
  other.begin_epoch(0);
  other.go_to(position);
  EXPECT_EQ(other.position().get<int64_t>("samples"), 2);
}

TEST(DataLoader, AnInfiniteEpochRepeatsEverySampleOnceAPass) {
  for (const int64_t world_size : {1, 2}) {
    std::vector<std::vector<int64_t>> of_ranks;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      DataLoader loader(numbers(10), {.batch_size = 4, .shuffle = true, .seed = 2, .infinite = true});
      loader.set_shard({.rank = rank, .world_size = world_size, .even = true});
      EXPECT_EQ(loader.num_batches(), std::nullopt);
      loader.begin_epoch(0);
      std::vector<int64_t> all;
      for (int64_t i = 0; i < 15 / world_size; ++i)
        std::ranges::copy(samples_of(loader.next().value()), std::back_inserter(all));
      of_ranks.push_back(all);
    }
    std::vector<int64_t> together;
    for (size_t i = 0; i < of_ranks[0].size(); ++i) {
      for (const auto& of_rank : of_ranks) together.push_back(of_rank[i]);
    }
    std::set<std::vector<int64_t>> orders;
    for (size_t pass = 0; pass + 1 < together.size() / 10; ++pass) {
      std::vector<int64_t> once(together.begin() + static_cast<int64_t>(pass) * 10,
                                together.begin() + static_cast<int64_t>(pass + 1) * 10);
      orders.insert(once);
      std::ranges::sort(once);
      EXPECT_THAT(once, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
    }
    EXPECT_EQ(orders.size(), together.size() / 10 - 1) << "each pass has an order of its own";
  }
}

TEST(DataLoader, EachPassOfAnInfiniteEpochDrawsItsOwnNumbersAndCanBeResumed) {
  for (const int64_t workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 4, .shuffle = true, .seed = 2, .workers = workers, .infinite = true};
    const auto take = [](Loader& loader, int64_t count) {
      std::vector<std::pair<int64_t, double>> all;
      for (int64_t i = 0; i < count; ++i) {
        const Batch batch = loader.next().value();
        for (int64_t j = 0; j < 4; ++j)
          all.emplace_back(batch["x"][j].item<int64_t>(), batch["noise"][j].item<double>());
      }
      return all;
    };
    DataLoader loader(std::make_shared<Noisy>(10), options);
    loader.begin_epoch(0);
    auto all = take(loader, 3);
    const State position = loader.position();  // two samples into the second pass
    const auto rest = take(loader, 7);
    DataLoader resumed(std::make_shared<Noisy>(10), options);
    resumed.begin_epoch(0);
    resumed.go_to(position);
    EXPECT_EQ(take(resumed, 7), rest);
    all.insert(all.end(), rest.begin(), rest.end());
    EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size()) << "a sample draws other numbers in each pass";
  }
}

TEST(DataLoader, PadsToTheLongestOfABatch) {
  DataLoader loader(std::make_shared<Ragged>(), {.batch_size = 3, .collate = pad_to_longest({{"x", -1.0}})});
  loader.begin_epoch(0);
  const Batch batch = loader.next().value();
  EXPECT_TRUE(batch["x"].equal(torch::tensor({{0., -1., -1.}, {0., 0., -1.}, {0., 0., 0.}}, at::kFloat)));
  EXPECT_TRUE(batch["x_mask"].equal(torch::tensor({{true, false, false}, {true, true, false}, {true, true, true}})));
}

struct SometimesScalar : Counted {
  Batch get(int64_t index, Random&) const override {
    return {{"x", index == 1 ? torch::tensor(1.0) : torch::zeros({index + 1})}};
  }
};

TEST(DataLoader, PaddingRefusesAScalarAmongVectors) {
  DataLoader loader(std::make_shared<SometimesScalar>(), {.batch_size = 3, .collate = pad_to_longest({})});
  loader.begin_epoch(0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { loader.next(); }), HasSubstr("the dimensions of 'x'"));
}

TEST(DataLoader, RefusesFewerSamplesThanRanks) {
  DataLoader loader(numbers(2), {});
  EXPECT_EQ(message_of<UsageError>([&] { loader.set_shard({.rank = 0, .world_size = 3, .even = true}); }),
            "TensorDataset has 2 samples, fewer than the 3 ranks; use fewer devices");
  EXPECT_TRUE(loader.set_shard({.rank = 2, .world_size = 3, .even = false})) << "an evaluation may leave a rank out";
}

TEST(DataLoader, ABatchSamplerExcludesWhatElseCuts) {
  const auto sampler =
      std::make_shared<SimilarLengthSampler>(std::vector<int64_t>{1, 2}, SimilarLengthSamplerOptions{.batch_size = 1});
  EXPECT_THAT(message_of<UsageError>([&] { DataLoader(numbers(2), {.batch_size = 2, .batch_sampler = sampler}); }),
              HasSubstr("batch_sampler says what each batch has"));
}

struct ShortSampler : Sampler {
  at::Tensor indices(int64_t) const override { return torch::arange(3); }
  int64_t size() const override { return 5; }
};

struct ShortBatchSampler : BatchSampler {
  std::vector<at::Tensor> batches(int64_t) const override { return {torch::arange(2)}; }
  int64_t size() const override { return 2; }
};

TEST(DataLoader, RefusesASamplerThatReturnsAnotherNumberThanItPromised) {
  DataLoader by_sample(numbers(5), {.sampler = std::make_shared<ShortSampler>()});
  EXPECT_EQ(message_of<SetupError>([&] { epoch_of(by_sample, 0); }),
            "Sampler::size() is 5, but indices() has returned 3; make them equal");
  DataLoader by_batch(numbers(5), {.batch_sampler = std::make_shared<ShortBatchSampler>()});
  EXPECT_THAT(message_of<SetupError>([&] { epoch_of(by_batch, 0); }), HasSubstr("is 2, but batches() has returned 1"));
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

// Chooses samples that a dataset of 5 does not have.
struct BatchesOfSix final : BatchSampler {
  int64_t size() const override { return 1; }
  std::vector<at::Tensor> batches(int64_t) const override { return {torch::arange(6)}; }
};

TEST(DataLoader, ASamplerOfAnotherDatasetIsRefused) {
  const auto expected = HasSubstr("the sampler chooses sample 5, but the dataset has 5");
  DataLoader by_sample(numbers(5), {.sampler = std::make_shared<SequentialSampler>(6)});
  EXPECT_THAT(message_of<SetupError>([&] { by_sample.begin_epoch(0); }), expected);
  DataLoader by_batch(numbers(5), {.batch_sampler = std::make_shared<BatchesOfSix>()});
  EXPECT_THAT(message_of<SetupError>([&] { by_batch.begin_epoch(0); }), expected);
}

TEST(PadToLongest, RefusesWhatItCannotDo) {
  const std::vector<Batch> samples{{{"tokens", torch::arange(3)}, {"tokens_mask", torch::ones(3)}}};
  EXPECT_THAT(message_of<c10::ValueError>([&] { pad_to_longest()(samples); }),
              HasSubstr("'tokens_mask', which a sample already has"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { pad_to_longest({{"token", -100}})(samples); }),
              HasSubstr("a sample has no tensor 'token' to pad"));
}

}  // namespace
}  // namespace fulgur
