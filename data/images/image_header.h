#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace fulgur {

enum class ImageFormat { jpeg, png, webp };

// What is known of a picture before it is decoded.
struct ImageHeader {
  ImageFormat format = ImageFormat::png;
  int64_t height = 0, width = 0;       // pixels of the upright picture
  int orientation = 1;                 // EXIF: how the stored picture has to be turned, 1 (not at all) to 8
  bool has_arithmetic_coding = false;  // JPEG only: a byte of the file may stand for any number of pixels
};

// Throws std::runtime_error: "cannot read the picture 'cat.jpg': <reason>".
[[noreturn]] void throw_image_error(const std::string& name, const std::string& reason);

}  // namespace fulgur
