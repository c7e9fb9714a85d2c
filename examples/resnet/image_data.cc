#include "examples/resnet/image_data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/data/images/image_dataset.h"
#include "fulgur/data/images/image_transforms.h"

namespace resnet {
namespace {

using namespace fulgur;
namespace fs = std::filesystem;

constexpr int64_t kDigitSize = 8, kPictureSize = 224;  // pixels

std::shared_ptr<ImageDataset> read_folder(const fs::path& root, const char* part, const ImageOptions& options) {
  const fs::path folder = root / part;
  if (fs::is_directory(folder)) return ImageDataset::from_folder(folder, options);
  throw UsageError(fmt::format("there is no folder '{}': put pictures in {}/train/<class>/ and {}/val/<class>/",
                               folder.string(), root.string(), root.string()));
}

DatasetPtr resized(DatasetPtr images, int64_t size) {
  return map_samples(std::move(images), [size](const Batch& sample, Random&) {
    return sample.with("image", resize_image(sample["image"], size, size));
  });
}

}  // namespace

void ImageDataOptions::describe(FieldVisitor& visit) {
  visit({.name = "file", .help = "file of the digits: gzipped CSV"}, &file);
  visit({.name = "path", .help = "folder of pictures to read instead: train/<class>/*.png and val/<class>/*.png"},
        &path);
  visit({.name = "image_size",
         .help = "side of an image; none: 8, 32 or 224, as suits the data and the model",
         .unit = "pixels",
         .min = 1},
        &image_size);
  visit({.name = "batch_size", .help = "images per step", .min = 1}, &batch_size);
}

int64_t ImageDataOptions::num_classes() const {
  if (path.empty()) return 10;
  return std::ssize(read_folder(path, "train", {})->classes());
}

ImageData::ImageData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {}

void ImageData::setup(EntryPoint) {
  if (train_ != nullptr) return;
  if (options_.path.empty()) return read_digits();
  read_pictures();
}

void ImageData::read_digits() {
  const auto [train, held_out] = digits::split_digits(options_.file, seed_);
  const int64_t size = options_.image_size.value_or(kDigitSize);
  train_ = resized(train, size);
  val_ = resized(held_out, size);
}

void ImageData::read_pictures() {
  ImageOptions options{.size = options_.image_size.value_or(kPictureSize), .mean = kImageNetMean, .std = kImageNetStd};
  const auto val = read_folder(options_.path, "val", options);
  options.augment = true;
  const auto train = read_folder(options_.path, "train", options);
  std::vector<std::string> only_in_one;
  std::ranges::set_symmetric_difference(train->classes(), val->classes(), std::back_inserter(only_in_one));
  if (!only_in_one.empty()) {
    throw UsageError(
        fmt::format("only one of '{0}/train' and '{0}/val' has '{1}'; the folders are the classes, and both "
                    "must have the same",
                    options_.path.string(), fmt::join(only_in_one, "', '")));
  }
  train_ = train;
  val_ = val;
}

std::shared_ptr<Loader> ImageData::train_dataloader() {
  return DataLoader::make(
      train_,
      {.batch_size = options_.batch_size, .shuffle = true, .seed = seed_, .drop_last = true, .workers = "auto"});
}

LoaderList ImageData::val_dataloader() {
  return DataLoader::make(val_, {.batch_size = options_.batch_size, .workers = "auto"});
}

}  // namespace resnet
