#pragma once

#include <png.h>

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <vector>

namespace fulgur::testing {

// Writes a grey PNG whose pixel at (x, y) has the level (x + 3 y + first) modulo 256.
inline void write_png(const std::filesystem::path& path, uint32_t height, uint32_t width, uint32_t first = 0) {
  std::vector<uint8_t> levels;
  for (uint32_t y = 0; y < height; ++y) {
    for (uint32_t x = 0; x < width; ++x) levels.push_back(static_cast<uint8_t>(x + 3 * y + first));
  }
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = width;
  image.height = height;
  image.format = PNG_FORMAT_GRAY;
  std::filesystem::create_directories(path.parent_path());
  if (::png_image_write_to_file(&image, path.c_str(), 0, levels.data(), 0, nullptr) == 0) {
    throw std::runtime_error(image.message);
  }
}

}  // namespace fulgur::testing
