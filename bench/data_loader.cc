// What DataLoader costs and gains.
//   - Pictures of 1x28x28 that are in memory, 64 in a batch, beside one index_select for each tensor of a batch.
//   - Samples that take 1 ms each to make, with one worker, two workers and none, beside torch::data's loader.
//   - How long a step of 5 ms that leaves the CPU alone, as a GPU's does, waits for a batch of 8 such samples.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:data_loader [-- rounds]
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/data.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "bench/side_by_side.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

constexpr auto kTransform = std::chrono::milliseconds(1);
constexpr int64_t kSlowSamples = 64, kSlowBatch = 8;

// Computes until a millisecond is over, as a transform of a sample does.
at::Tensor slow_sample(int64_t index) {
  for (const auto end = Clock::now() + kTransform; Clock::now() < end;) {
  }
  return at::full({16}, index);
}

struct SlowDataset final : Dataset {
  int64_t size() const override { return kSlowSamples; }
  Batch get(int64_t index, Random&) const override { return {{"x", slow_sample(index)}}; }
};

struct SlowTorchDataset : torch::data::Dataset<SlowTorchDataset> {
  torch::data::Example<> get(size_t index) override {
    return {slow_sample(static_cast<int64_t>(index)), at::zeros({1})};
  }
  std::optional<size_t> size() const override { return kSlowSamples; }
};

void read_all(Loader& loader) {
  loader.begin_epoch(0);
  while (loader.next()) {
  }
}

void pictures_in_memory(int rounds) {
  constexpr int64_t kPictures = 60'000, kBatch = 64;
  const at::Tensor images = torch::rand({kPictures, 1, 28, 28}), labels = torch::arange(kPictures) % 10;
  DataLoader loader(TensorDataset::make({{"image", images}, {"label", labels}}),
                    {.batch_size = kBatch, .shuffle = true, .seed = 1});
  const auto select_alone = [&] {
    const at::Tensor order = RandomSampler(kPictures, 1).indices(0);
    for (int64_t i = 0; i < kPictures; i += kBatch) {
      const at::Tensor indices = order.narrow(0, i, std::min(kBatch, kPictures - i));
      images.index_select(0, indices);
      labels.index_select(0, indices);
    }
  };
  const auto timings = bench::side_by_side(
      "sample", kPictures, {{"index_select alone", select_alone}, {"DataLoader", [&] { read_all(loader); }}}, rounds);
  fmt::print("{:.2f} million samples/s\n\n", 1e-6 / timings[1].seconds);
}

void slow_samples(int rounds) {
  const auto slow = std::make_shared<SlowDataset>();
  DataLoader alone(slow, {.batch_size = kSlowBatch}), one(slow, {.batch_size = kSlowBatch, .workers = 1}),
      two(slow, {.batch_size = kSlowBatch, .workers = 2});
  const auto by_torch = [] {
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        SlowTorchDataset().map(torch::data::transforms::Stack<>()),
        torch::data::DataLoaderOptions().batch_size(kSlowBatch).workers(2));
    for (auto& batch : *loader) static_cast<void>(batch);
  };
  bench::side_by_side("sample", kSlowSamples,
                      {{"one worker", [&] { read_all(one); }},
                       {"two workers", [&] { read_all(two); }},
                       {"no worker", [&] { read_all(alone); }},
                       {"torch::data, two workers", by_torch}},
                      rounds);
}

// The share of its time that a step of 5 ms waits, from the second batch on.
void waiting(int rounds) {
  constexpr auto kStep = std::chrono::milliseconds(5);
  DataLoader loader(std::make_shared<SlowDataset>(), {.batch_size = kSlowBatch, .workers = 2});
  Clock::duration waited{};
  int64_t steps = 0;
  for (int round = 0; round < rounds; ++round) {
    loader.begin_epoch(round);
    loader.next();
    while (true) {
      std::this_thread::sleep_for(kStep);
      const auto start = Clock::now();
      if (!loader.next()) break;
      waited += Clock::now() - start;
      ++steps;
    }
  }
  const double share =
      static_cast<double>(waited.count()) / static_cast<double>((steps * Clock::duration(kStep)).count());
  fmt::print("\na step of 5 ms waits {:.1f}% of it for a batch of 8 samples of 1 ms from two workers\n", 100 * share);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  pictures_in_memory(rounds);
  slow_samples(rounds);
  waiting(rounds);
}
