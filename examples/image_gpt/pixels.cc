#include "examples/image_gpt/pixels.h"

#include <fmt/format.h>
#include <png.h>

#include <numbers>
#include <stdexcept>

namespace image_gpt {
namespace {

constexpr int64_t kDigitsPerRow = 8;
constexpr int64_t kMagnification = 4;  // times
constexpr int64_t kMargin = 2;         // pixels of the sheet
constexpr int64_t kMarginShade = 96;   // shades go from 0 to 255

}  // namespace

at::Tensor levels_of(const at::Tensor& images) { return (images.flatten(1) * (kNumLevels - 1)).round().to(at::kLong); }

double independent_pixels_bpd(const at::Tensor& train, const at::Tensor& held_out) {
  const auto counts = at::one_hot(train, kNumLevels).sum(0).to(at::kDouble) + 1;  // [place, level]
  const auto log_probability = (counts / counts.sum(1, /*keepdim=*/true)).log();
  return -log_probability.gather(1, held_out.t()).mean().item<double>() / std::numbers::ln2;
}

void write_sheet(const at::Tensor& levels, const std::filesystem::path& file) {
  const int64_t num_rows = (levels.size(0) + kDigitsPerRow - 1) / kDigitsPerRow;
  const auto shades = (levels.view({-1, kSide, kSide}) * 255).floor_divide(kNumLevels - 1);
  const auto magnified = shades.repeat_interleave(kMagnification, 1).repeat_interleave(kMagnification, 2);
  const auto tiles = at::constant_pad_nd(
      magnified, {0, kMargin, 0, kMargin, 0, num_rows * kDigitsPerRow - levels.size(0)}, kMarginShade);
  const auto sheet = tiles.unflatten(0, {num_rows, kDigitsPerRow}).transpose(1, 2).flatten(2).flatten(0, 1);
  const auto bytes = sheet.to(at::kByte).contiguous();

  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  header.format = PNG_FORMAT_GRAY;
  header.height = static_cast<png_uint_32>(bytes.size(0));
  header.width = static_cast<png_uint_32>(bytes.size(1));
  if (png_image_write_to_file(&header, file.c_str(), 0, bytes.const_data_ptr<uint8_t>(), 0, nullptr) == 0) {
    throw std::runtime_error(fmt::format("cannot write '{}': {}", file.string(), header.message));
  }
}

}  // namespace image_gpt
