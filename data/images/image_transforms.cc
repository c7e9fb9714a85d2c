#include "fulgur/data/images/image_transforms.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

namespace fulgur {
namespace {

constexpr size_t kLevels = 256;

int64_t rounded(double value) { return static_cast<int64_t>(std::nearbyint(value)); }  // halves to even, as in Python

Crop centered(int64_t height, int64_t width, int64_t crop_height, int64_t crop_width) {
  return {(height - crop_height) / 2, (width - crop_width) / 2, crop_height, crop_width};
}

// What each level of a channel becomes.
std::array<float, kLevels> normalized_levels(float mean, float std) {
  std::array<float, kLevels> levels;
  for (size_t level = 0; level < kLevels; ++level) levels[level] = (static_cast<float>(level) / 255.0F - mean) / std;
  return levels;
}

float value_of(const std::vector<double>& values, int64_t channel, double if_empty) {
  return static_cast<float>(values.empty() ? if_empty : values.at(static_cast<size_t>(channel)));
}

}  // namespace

Crop random_resized_crop(int64_t height, int64_t width, std::pair<double, double> scale,
                         std::pair<double, double> ratio, Random& random) {
  constexpr int kTries = 10;
  const auto area = static_cast<double>(height * width);
  for (int i = 0; i < kTries; ++i) {
    const double target_area = area * random.uniform(scale.first, scale.second);
    const double target_ratio = std::exp(random.uniform(std::log(ratio.first), std::log(ratio.second)));
    const int64_t crop_width = rounded(std::sqrt(target_area * target_ratio));
    const int64_t crop_height = rounded(std::sqrt(target_area / target_ratio));
    if (crop_width < 1 || crop_width > width || crop_height < 1 || crop_height > height) continue;
    const int64_t top = random.below(height - crop_height + 1);
    return {top, random.below(width - crop_width + 1), crop_height, crop_width};
  }
  const double whole_ratio = static_cast<double>(width) / static_cast<double>(height);
  if (whole_ratio < ratio.first) {
    return centered(height, width, rounded(static_cast<double>(width) / ratio.first), width);
  }
  if (whole_ratio > ratio.second) {
    return centered(height, width, height, rounded(static_cast<double>(height) * ratio.second));
  }
  return centered(height, width, height, width);
}

Crop center_crop(int64_t height, int64_t width, int64_t size) {
  return {rounded(static_cast<double>(height - size) / 2), rounded(static_cast<double>(width - size) / 2), size, size};
}

at::Tensor crop_of(const at::Tensor& image, const Crop& crop) {
  return image.narrow(1, crop.top, crop.height).narrow(2, crop.left, crop.width);
}

at::Tensor resize_image(const at::Tensor& image, int64_t height, int64_t width) {
  if (image.size(1) == height && image.size(2) == width) return image;
  // ATen takes its fast path for a batch of one whose strides say channels last in every dim.
  const at::Tensor batch = image.permute({1, 2, 0}).contiguous().unsqueeze(0).permute({0, 3, 1, 2});
  return at::_upsample_bilinear2d_aa(batch, {height, width}, /*align_corners=*/false, std::nullopt, std::nullopt)
      .squeeze(0);
}

std::pair<int64_t, int64_t> size_with_shorter_side(int64_t height, int64_t width, int64_t shorter) {
  if (height < width) return {shorter, shorter * width / height};
  return {shorter * height / width, shorter};
}

void normalize_into(const at::Tensor& out, const at::Tensor& image, const std::vector<double>& mean,
                    const std::vector<double>& std) {
  TORCH_CHECK_VALUE(out.is_contiguous() && out.scalar_type() == at::kFloat && out.sizes() == image.sizes(),
                    "normalize_into writes to a contiguous float tensor of the image's sizes");
  const uint8_t* from = image.const_data_ptr<uint8_t>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t c = 0; c < image.size(0); ++c) {
    const std::array<float, kLevels> levels = normalized_levels(value_of(mean, c, 0), value_of(std, c, 1));
    for (int64_t y = 0; y < image.size(1); ++y) {
      const uint8_t* pixel = from + c * image.stride(0) + y * image.stride(1);
      for (int64_t x = 0; x < image.size(2); ++x, pixel += image.stride(2)) *to++ = levels[*pixel];
    }
  }
}

}  // namespace fulgur
