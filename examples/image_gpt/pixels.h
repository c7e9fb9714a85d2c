#pragma once

#include <cstdint>
#include <filesystem>

#include "fulgur.h"

namespace image_gpt {

constexpr int64_t kSide = 8;                   // pixels
constexpr int64_t kNumPixels = kSide * kSide;  // in raster order: row by row, from the top left
constexpr int64_t kNumLevels = 17;             // a pixel's grey level is 0 to 16

// The grey levels of images: float [count, 1, 8, 8] in 0..1 become int64 [count, 64] in 0..16.
at::Tensor levels_of(const at::Tensor& images);

// Bits per dimension of `held_out` for a model that takes no pixel for another's neighbour: it knows only how often
// each place has each level in `train`. The baseline for a model that reads. Each level counts once more than it
// occurs, so that none is impossible. Both: int64 [count, 64].
double independent_pixels_bpd(const at::Tensor& train, const at::Tensor& held_out);

// Writes digits, int64 [count, 64], as one grey PNG of eight digits to a row, each pixel magnified to 4 x 4 and each
// digit with a grey margin to its right and below. Level 16 is white. Throws std::runtime_error, naming the file, if it
// cannot be written.
void write_sheet(const at::Tensor& levels, const std::filesystem::path& file);

}  // namespace image_gpt
