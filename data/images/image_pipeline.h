#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/data/images/decode_image.h"
#include "fulgur/data/random.h"

namespace fulgur {

// The mean and standard deviation of ImageNet's pixels, which most published weights expect.
inline const std::vector<double> kImageNetMean{0.485, 0.456, 0.406}, kImageNetStd{0.229, 0.224, 0.225};

// How a file becomes a tensor that a model takes.
// For training (`augment`): a random crop, resized to a square of `size`, mirrored in half of the cases.
// For evaluation: resized so that the shorter side is `resize`, then the square of `size` in the middle.
// Then (value / 255 - mean) / std. Each step does the same as torchvision's RandomResizedCrop, RandomHorizontalFlip,
// Resize, CenterCrop, ToTensor and Normalize.
struct ImageOptions {
  int64_t size = 224;                          // pixels: side of the square
  bool augment = false;                        // training: draws a crop and whether it is mirrored
  std::optional<int64_t> resize{};             // evaluation, pixels: nullopt is size / 0.875, which is 256 for 224
  std::pair<double, double> scale{0.08, 1.0};  // training: range of the crop's share of the area
  std::pair<double, double> ratio{3.0 / 4.0, 4.0 / 3.0};  // training: range of the crop's width over its height
  double flip = 0.5;                                      // training: probability that the picture is mirrored
  ImageColor color = ImageColor::rgb;
  std::vector<double> mean{}, std{};  // for each channel, of values in 0..1; empty: 0 and 1
  // A JPEG at least twice as large as asked for is decoded at 1/2, 1/4 or 1/8 of the size of the file: this is faster,
  // and the pixels differ slightly.
  bool allows_scaled_decoding = false;
  // A picture with more pixels is refused, and so is one that the resize of evaluation would make larger than this.
  int64_t max_pixels = kDefaultMaxPixels;
  void describe(FieldVisitor& visit);
};

// Throws UsageError for options that cannot be used.
void check_image_options(const ImageOptions& options);

int64_t num_channels(const ImageOptions& options);

// Reads a file into `out`, contiguous float [C, size, size]. Throws std::runtime_error with the file and the reason.
// Draws from `random` for training only. Safe on any number of threads at once, if each has its own `out` and `random`.
void read_image_into(const at::Tensor& out, const std::filesystem::path& file, const ImageOptions& options,
                     Random& random);

}  // namespace fulgur
