// Pictures per second of an ImageDataset with two workers: read, decoded, augmented (a random crop to 224 x 224,
// mirrored in half of the cases), normalized and put into batches of 64. bench/python_images.py makes the folder, and
// compares with torch's DataLoader and torchvision:
//   ./bazelw build //bench:image_loader && python3 bench/python_images.py bazel-bin/bench/image_loader china.jpg
//   flower.jpg
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "fulgur/data/data_loader.h"
#include "fulgur/data/images/image_dataset.h"

namespace {

using namespace fulgur;

void read_epoch(Loader& loader, int64_t epoch) {
  loader.begin_epoch(epoch);
  while (loader.next()) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc < 2) return fmt::print(stderr, "usage: image_loader <folder> [train|eval|scaled] [size]\n"), 2;
  const std::string_view mode = argc > 2 ? argv[2] : "train";
  const auto dataset = ImageDataset::from_folder(argv[1], {.size = argc > 3 ? std::stoll(argv[3]) : 224,
                                                           .augment = mode != "eval",
                                                           .mean = kImageNetMean,
                                                           .std = kImageNetStd,
                                                           .allows_scaled_decoding = mode == "scaled"});
  DataLoader loader(dataset, {.batch_size = 64, .seed = 1, .workers = 2});
  read_epoch(loader, 0);  // warms up
  const auto start = std::chrono::steady_clock::now();
  read_epoch(loader, 1);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{:.1f} images/s\n", static_cast<double>(dataset->size()) / seconds);
}
