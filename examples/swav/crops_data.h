#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "examples/digits/digits_data.h"
#include "examples/swav/multi_crop.h"
#include "fulgur.h"

namespace swav {

struct CropsDataOptions {
  std::filesystem::path file = digits::default_file();
  int64_t batch_size = 128;  // images per step
  MultiCropOptions crops{};
  void describe(fulgur::FieldVisitor& visit);
};

// The UCI digits, of which 360, drawn by the seed, are held out. Training: crops as multi_crop() makes them, without
// labels. Test: the held-out digits with labels.
// Batches of labelled images: "image", float [batch_size, 1, large_size, large_size]; "label", int64 [batch_size].
class CropsData final : public fulgur::DataModule {
 public:
  using Options = CropsDataOptions;
  CropsData(Options options, uint64_t seed);
  void setup(fulgur::EntryPoint entry_point) override;
  std::shared_ptr<fulgur::Loader> train_dataloader() override;
  fulgur::LoaderList test_dataloader() override;

  // The digits of training, whole and with labels, in a fixed order. After setup().
  std::shared_ptr<fulgur::Loader> labelled_dataloader() const;

  uint64_t seed() const { return seed_; }

 private:
  fulgur::DatasetPtr whole(const std::shared_ptr<fulgur::TensorDataset>& digits) const;

  Options options_;
  uint64_t seed_;
  digits::SplitDigits digits_{};
};

}  // namespace swav
