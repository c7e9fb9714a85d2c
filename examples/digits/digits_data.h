#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "fulgur.h"

namespace digits {

// The UCI digits: 1,797 handwritten digits of 8 x 8 pixels. The file is the one that scikit-learn ships: gzipped CSV,
// 64 pixels of 0 to 16 and a label in each row. Returns "image", float [1797, 1, 8, 8] in 0..1, and "label", int64
// [1797]. Throws UsageError if the file is missing or has another format.
fulgur::Batch read_digits(const std::filesystem::path& file);

// The same from `folder/<digit>/*.png` (or .jpg, .webp): grey pictures, made 8 x 8 if they are larger, where black is 0
// and white is 1. Throws UsageError unless there are ten folders with pictures.
fulgur::Batch read_digit_pictures(const std::filesystem::path& folder);

// The digits of the file, of which 360, drawn by `seed`, are held out.
struct SplitDigits {
  std::shared_ptr<fulgur::TensorDataset> train, held_out;
};
SplitDigits split_digits(const std::filesystem::path& file, uint64_t seed);

// The file that the build has downloaded for this program.
std::filesystem::path default_file();

struct DigitsDataOptions {
  std::filesystem::path file = default_file();
  std::filesystem::path path{};  // if not empty, the pictures in path/train are read instead of the file
  int64_t batch_size = 32;       // samples
  void describe(fulgur::FieldVisitor& visit);
};

// The digits split by `seed` into 180 for validation, 360 for test and the other 1,257 for training. Training shuffles,
// and drops the last short batch, so that every step sees the same number of samples.
class DigitsData final : public fulgur::DataModule {
 public:
  using Options = DigitsDataOptions;
  DigitsData(Options options, uint64_t seed);
  void setup(fulgur::EntryPoint entry_point) override;
  std::shared_ptr<fulgur::Loader> train_dataloader() override;
  fulgur::LoaderList val_dataloader() override;
  fulgur::LoaderList test_dataloader() override;

 private:
  Options options_;
  uint64_t seed_;
  std::vector<std::shared_ptr<fulgur::TensorDataset>> parts_;  // train, val, test
};

}  // namespace digits
