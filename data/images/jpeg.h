#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

#include "fulgur/data/images/image_header.h"

namespace fulgur {

// JPEG by libjpeg-turbo. `name` is what messages call the file. Both functions throw std::runtime_error for a file that
// cannot be decoded in full: every warning of libjpeg counts. Bytes between two segments before the first scan that
// belong to neither, which some cameras write, are passed over. More than a few bytes that are left over at the end of
// a scan are refused, because a changed byte can leave some as well. JPEG has no checksum: a changed byte after which
// the file can still be decoded cannot be noticed. Safe on any number of threads at once.
ImageHeader read_jpeg_header(std::span<const uint8_t> bytes, const std::string& name);

// Returns uint8 [height, width, 1 or 3], both sides divided by `shrink` (1, 2, 4 or 8) and rounded up. Colour that is
// to become grey is the luminance of the file, without a detour over RGB.
at::Tensor decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, bool is_gray, int64_t shrink);

}  // namespace fulgur
