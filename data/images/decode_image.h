#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

#include "fulgur/data/images/image_header.h"

namespace fulgur {

enum class ImageColor { rgb, gray };

// Enough for a picture of 11,585 x 11,585; in RGB it takes 403 MB.
constexpr int64_t kDefaultMaxPixels = int64_t{1} << 27;

// Reads what a file says of its picture. The first bytes tell JPEG, PNG and WebP, not the name. Throws
// std::runtime_error, with `name` and the reason, if it is neither, if the picture has more than `max_pixels`, or if
// the file is too short for as many: before memory for pixels is allocated.
ImageHeader read_image_header(std::span<const uint8_t> bytes, const std::string& name,
                              int64_t max_pixels = kDefaultMaxPixels);

// What decode_image makes of the bytes of a picture.
struct DecodeOptions {
  ImageColor color = ImageColor::rgb;
  int64_t shrink = 1;  // 1, 2, 4 or 8: a JPEG is decoded with sides divided by it and rounded up, in less time. libjpeg
                       // has vector code for these alone; 5/8 takes longer than all pixels. Ignored by PNG and WebP.
  int64_t max_pixels = kDefaultMaxPixels;
};

// Decodes a picture and turns it upright (EXIF; JPEG only). Returns uint8 [C, H, W] with C = 3 or 1, whose memory has
// the channels of a pixel beside each other, as the files do and ATen's fast resizing needs it (channels last). Alpha
// is left out, 16 bits become 8. Throws as read_image_header does, and if the file is truncated or damaged.
at::Tensor decode_image(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options = {});

}  // namespace fulgur
