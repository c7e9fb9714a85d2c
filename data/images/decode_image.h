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

// Reads the header of a picture. The first bytes, not the name, tell JPEG, PNG and WebP apart. Before memory for pixels
// is allocated, throws std::runtime_error, with `name` and the reason, if the file has another format, if the picture
// has more than `max_pixels`, or if the file is too short for its pixels.
ImageHeader read_image_header(std::span<const uint8_t> bytes, const std::string& name,
                              int64_t max_pixels = kDefaultMaxPixels);

// The options of decode_image.
struct DecodeOptions {
  ImageColor color = ImageColor::rgb;
  int64_t shrink = 1;  // 1, 2, 4 or 8: divides the sides of a JPEG, rounded up, which decodes faster. PNG and WebP
                       // ignore it. libjpeg has vector code for these factors only: 5/8 takes longer than full size.
  int64_t max_pixels = kDefaultMaxPixels;
};

// Decodes a picture and turns it upright (EXIF; JPEG only). Returns uint8 [C, H, W] with C = 3 or 1 in channels-last
// memory format, which the files have and ATen's fast resizing needs. Alpha is dropped, and 16-bit samples become
// 8-bit. Throws as read_image_header does, and if the file is truncated or damaged.
at::Tensor decode_image(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options = {});

}  // namespace fulgur
