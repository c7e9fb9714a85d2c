#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "fulgur.h"

namespace swav {

// Which crops are made of an image. An area is relative to that of the image.
struct MultiCropOptions {
  static constexpr int64_t kDefaultNumSmall = 2, kDefaultSize = 8;
  std::optional<int64_t> num_small{};   // small crops, in addition to the two large ones; nullopt: kDefaultNumSmall
  std::optional<int64_t> large_size{};  // pixels of a side; nullopt: kDefaultSize
  std::optional<int64_t> small_size{};  // pixels of a side; nullopt: kDefaultSize
  std::pair<double, double> large_area{0.5, 1.0};
  std::pair<double, double> small_area{0.5, 0.8};
  double max_rotation = 15;  // degrees, either way
  double noise = 0.05;       // standard deviation of what is added to each pixel
  void describe(fulgur::FieldVisitor& visit);
};

// Random views of one image: squares of different areas and places, turned, resized and with Gaussian noise. Unlike
// crops of whole pixels, which ImageDataset makes, they suit images of 8 x 8. Views are neither mirrored, because a
// mirrored digit may be another one, nor in other colours, because digits have none.
//   image: float [channels, height, width].
// Returns "large": [2, channels, large_size, large_size], and, unless num_small is 0, "small": [num_small, channels,
// small_size, small_size]. Source: Caron et al. 2020, arXiv:2006.09882, section 3.2, for the two sizes.
fulgur::Batch multi_crop(const at::Tensor& image, const MultiCropOptions& options, fulgur::Random& random);

}  // namespace swav
