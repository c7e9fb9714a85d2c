#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fulgur/data/dataset.h"
#include "fulgur/data/images/image_pipeline.h"

namespace fulgur {

// A picture in a file, and the number of its class.
struct LabelledImage {
  std::filesystem::path file{};
  int64_t label = 0;
};

// Pictures in files, each with a label, decoded when they are read. A sample is {"image": float [C, size, size],
// "label": int64 scalar}.
//   auto train = ImageDataset::from_folder("pets/train", {.size = 224, .augment = true, .mean = kImageNetMean,
//                                                         .std = kImageNetStd});
//   auto loader = DataLoader::make(train, {.batch_size = 64, .shuffle = true});
// Errors: options that cannot be used throw UsageError; a folder, a list or a picture that cannot be read throws
// std::runtime_error with its path and the reason.
// Threading: as Dataset says; nothing is kept between calls, and none starts a thread.
class ImageDataset final : public Dataset {
 public:
  // The files of `root/<class>/` that end in .png, .jpg, .jpeg or .webp, in upper or lower case. The label is the
  // position of the class among the sorted names of the folders; pictures are sorted by name within their class. Names
  // that begin with a dot are left out.
  static std::shared_ptr<ImageDataset> from_folder(const std::filesystem::path& root, ImageOptions options = {});

  // A text file with a line `<file>,<label>` for each picture: cats/tom.jpg,3. Relative files are relative to the
  // folder of the list; the label is what follows the last comma. Empty lines are left out.
  static std::shared_ptr<ImageDataset> from_list(const std::filesystem::path& list, ImageOptions options = {});

  explicit ImageDataset(std::vector<LabelledImage> images, ImageOptions options = {});

  int64_t size() const override { return static_cast<int64_t>(images_.size()); }
  Batch get(int64_t index, Random& random) const override;
  Batch get_batch(const at::Tensor& indices, std::span<Random> random) const override;

  // Depends on the files' names and labels, not on their content, which would have to be read.
  std::string digest() const override { return digest_; }
  std::string sample_options() const override;  // all but max_pixels, which changes no picture

  const std::vector<std::string>& classes() const { return classes_; }  // by label; empty unless made by from_folder
  const std::vector<LabelledImage>& images() const { return images_; }

 private:
  std::vector<LabelledImage> images_;
  std::vector<std::string> classes_{};
  ImageOptions options_;
  std::string digest_;
};

}  // namespace fulgur
