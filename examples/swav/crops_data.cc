#include "examples/swav/crops_data.h"

#include <utility>

#include "fulgur/data/images/image_transforms.h"

namespace swav {

using namespace fulgur;

void CropsDataOptions::describe(FieldVisitor& visit) {
  visit({.name = "file", .help = "file of the digits: gzipped CSV"}, &file);
  visit({.name = "batch_size", .help = "images per step", .min = 1}, &batch_size);
  visit({.name = "crops", .help = "which views are made of an image"}, &crops);
}

CropsData::CropsData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {}

void CropsData::setup(EntryPoint) {
  if (digits_.train == nullptr) digits_ = digits::split_digits(options_.file, seed_);
}

std::shared_ptr<Loader> CropsData::train_dataloader() {
  const auto crops = map_samples(digits_.train, [options = options_.crops](const Batch& sample, Random& random) {
    return multi_crop(sample["image"], options, random);
  });
  return DataLoader::make(crops,
                          {.batch_size = options_.batch_size, .shuffle = true, .seed = seed_, .drop_last = true});
}

LoaderList CropsData::test_dataloader() {
  return DataLoader::make(whole(digits_.held_out), {.batch_size = options_.batch_size});
}

std::shared_ptr<Loader> CropsData::labelled_dataloader() const {
  return DataLoader::make(whole(digits_.train), {.batch_size = options_.batch_size});
}

DatasetPtr CropsData::whole(const std::shared_ptr<TensorDataset>& digits) const {
  const int64_t size = options_.crops.large_size.value_or(MultiCropOptions::kDefaultSize);
  return map_samples(digits, [size](const Batch& sample, Random&) {
    return sample.with("image", resize_image(sample["image"], size, size));
  });
}

}  // namespace swav
