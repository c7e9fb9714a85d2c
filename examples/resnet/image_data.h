#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "examples/digits/digits_data.h"
#include "fulgur.h"

namespace resnet {

struct ImageDataOptions {
  std::filesystem::path file = digits::default_file();
  std::filesystem::path path{};            // if not empty, pictures are read instead of the digits
  std::optional<int64_t> image_size = {};  // pixels of a side; nullopt: 8 for digits, 224 for pictures
  int64_t batch_size = 32;                 // images per step
  void describe(fulgur::FieldVisitor& visit);

  int64_t num_classes() const;  // reads the names of folders; throws UsageError if there are none
  int64_t num_channels() const { return path.empty() ? 1 : 3; }
};

// Images with labels: the UCI digits, of which 360, drawn by the seed, are held out for validation, unless `path` is
// set. With it the pictures of path/train/<class>/ and path/val/<class>/, in colour: cropped and mirrored at random for
// training, and the square in the middle for validation.
// Batches: "image", float [batch_size, num_channels, image_size, image_size]; "label", int64 [batch_size].
// Throws UsageError for a folder without such folders, or if train and val have different classes.
class ImageData final : public fulgur::DataModule {
 public:
  using Options = ImageDataOptions;
  ImageData(Options options, uint64_t seed);
  void setup(fulgur::EntryPoint entry_point) override;
  std::shared_ptr<fulgur::Loader> train_dataloader() override;
  fulgur::LoaderList val_dataloader() override;

 private:
  void read_digits();
  void read_pictures();

  Options options_;
  uint64_t seed_;
  std::shared_ptr<const fulgur::Dataset> train_{}, val_{};
};

}  // namespace resnet
