#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

#include "fulgur/data/images/image_header.h"

namespace fulgur {

// PNG by libpng. `name` is what messages call the file. Both functions throw std::runtime_error for a file that cannot
// be decoded in full. Safe on any number of threads at once.
ImageHeader read_png_header(std::span<const uint8_t> bytes, const std::string& name);

// Returns uint8 [height, width, 1 or 3]. Of 16 bits the upper 8 are kept. Alpha is left out, not mixed with a
// background, and levels are not corrected by the file's gamma: as in Pillow and torchvision.
at::Tensor decode_png(std::span<const uint8_t> bytes, const std::string& name, bool is_gray);

}  // namespace fulgur
