// Pictures per second of an ImageDataset with two workers: read, decoded, augmented (a random crop to 224 x 224,
// mirrored in half of the cases), normalized and put into batches of 64. bench/python_images.py makes the folder, and
// compares with torch's DataLoader and torchvision:
//   ./bazelw build //bench:image_loader && python3 bench/python_images.py bazel-bin/bench/image_loader china.jpg
//   flower.jpg
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fulgur/data/images/image_dataset.h"

namespace {

using namespace fulgur;

constexpr int64_t kWorkers = 2, kBatchSize = 64;

void read_share(const Dataset& dataset, int64_t worker, int64_t epoch) {
  at::get_num_threads();  // the first call in a thread sets the number: later it would overwrite ours
  at::set_num_threads(1);
  for (int64_t start = worker * kBatchSize; start < dataset.size(); start += kWorkers * kBatchSize) {
    const at::Tensor indices = at::arange(start, std::min(start + kBatchSize, dataset.size()), at::kLong);
    dataset.get_batch(indices, {.seed = 1, .epoch = epoch});
  }
}

void read_epoch(const Dataset& dataset, int64_t epoch) {
  std::vector<std::thread> workers;
  for (int64_t worker = 0; worker < kWorkers; ++worker) {
    workers.emplace_back([&, worker] { read_share(dataset, worker, epoch); });
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return fmt::print(stderr, "usage: image_loader <folder> [train|eval|scaled] [size]\n"), 2;
  const std::string_view mode = argc > 2 ? argv[2] : "train";
  const auto dataset = ImageDataset::from_folder(argv[1], {.size = argc > 3 ? std::stoll(argv[3]) : 224,
                                                           .augment = mode != "eval",
                                                           .mean = kImageNetMean,
                                                           .std = kImageNetStd,
                                                           .allows_scaled_decoding = mode == "scaled"});
  read_epoch(*dataset, 0);  // warms up
  const auto start = std::chrono::steady_clock::now();
  read_epoch(*dataset, 1);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{:.1f} images/s\n", static_cast<double>(dataset->size()) / seconds);
}
