#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

#include "fulgur/data/images/image_header.h"

namespace fulgur {

// JPEG by libjpeg-turbo. `name` is what messages call the file. Both functions throw std::runtime_error for a file that
// cannot be decoded in full: every warning of libjpeg counts. Stray bytes between two segments before the first scan,
// which some cameras write, are skipped. More than a few stray bytes at the end of a scan are refused, because damage
// can leave some as well. JPEG has no checksum: damage after which the file can still be decoded goes unnoticed. Safe
// on any number of threads at once.
ImageHeader read_jpeg_header(std::span<const uint8_t> bytes, const std::string& name);

// Returns uint8 [height, width, 1 or 3], both sides divided by `shrink` (1, 2, 4 or 8) and rounded up. Colour that is
// to become grey is the luminance of the file, without a detour over RGB.
at::Tensor decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, bool is_gray, int64_t shrink);

}  // namespace fulgur
