#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

#include "fulgur/data/images/image_header.h"

namespace fulgur {

// WebP, lossy and lossless, by libwebp; an animation is refused. `name` is what messages call the file. Both functions
// throw std::runtime_error for a file that cannot be decoded in full. Safe on any number of threads at once.
ImageHeader read_webp_header(std::span<const uint8_t> bytes, const std::string& name);

// Returns uint8 [height, width, 1 or 3]; alpha is left out, not mixed with a background.
at::Tensor decode_webp(std::span<const uint8_t> bytes, const std::string& name, bool is_gray);

}  // namespace fulgur
