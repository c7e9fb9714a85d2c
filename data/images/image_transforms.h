#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fulgur/data/random.h"

namespace fulgur {

// The steps of the usual pipelines. Each function does what torchvision 0.26 does under the same name; images are
// [C, H, W]. The functions are fastest on uint8 images in channels-last memory, as decode_image returns them.

// A rectangle of an image, in pixels.
struct Crop {
  int64_t top = 0, left = 0, height = 0, width = 0;
};

// A crop whose share of the area is uniform in `scale`, and whose width over height is uniform in `ratio` on a log
// scale. If ten tries do not fit into the image, returns the central crop with the nearest possible ratio.
Crop random_resized_crop(int64_t height, int64_t width, std::pair<double, double> scale,
                         std::pair<double, double> ratio, Random& random);

// The square of `size` pixels in the middle.
Crop center_crop(int64_t height, int64_t width, int64_t size);

// A view. Throws c10::IndexError if the crop is not within the image.
at::Tensor crop_of(const at::Tensor& image, const Crop& crop);

// Resizes bilinearly, with antialiasing where the image shrinks; uint8 stays uint8. Equals torchvision's
// resize(antialias=True).
at::Tensor resize_image(const at::Tensor& image, int64_t height, int64_t width);

// The height and width at which the shorter side is `shorter`, and the ratio is kept.
std::pair<int64_t, int64_t> size_with_shorter_side(int64_t height, int64_t width, int64_t shorter);

// Writes (image / 255 - mean) / std to `out`, contiguous float [C, H, W], from uint8 of the same sizes. `mean` and
// `std` have a value for each channel or are empty, which is 0 and 1. Equals torchvision's to_tensor and normalize to
// the last bit.
void normalize_into(const at::Tensor& out, const at::Tensor& image, const std::vector<double>& mean,
                    const std::vector<double>& std);

}  // namespace fulgur
