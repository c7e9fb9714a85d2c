#include "fulgur/callbacks/png.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fulgur/base/crc32.h"

namespace fulgur {
namespace {

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string chunk(std::string_view type, std::string_view data) {
  const std::string checked = std::string(type).append(data);
  return big_endian(static_cast<uint32_t>(data.size())) + checked + big_endian(crc32(checked));
}

uint32_t adler32(std::string_view bytes) {
  constexpr uint32_t kPrime = 65521;
  uint32_t a = 1, b = 0;
  for (const char byte : bytes) {
    a = (a + static_cast<unsigned char>(byte)) % kPrime;
    b = (b + a) % kPrime;
  }
  return b << 16 | a;
}

// A zlib stream (RFC 1950) of stored blocks (RFC 1951, 3.2.4).
std::string stored(std::string_view bytes) {
  constexpr size_t kMostBytes = 65535;  // what one block can have
  std::string stream = "\x78\x01";
  const std::string check = big_endian(adler32(bytes));
  do {
    const std::string_view block = bytes.substr(0, kMostBytes);
    bytes.remove_prefix(block.size());
    stream += static_cast<char>(bytes.empty() ? 1 : 0);
    const auto size = static_cast<uint16_t>(block.size());
    for (const uint16_t number : {size, static_cast<uint16_t>(~size)}) {
      stream += static_cast<char>(number & 0xFF);
      stream += static_cast<char>(number >> 8);
    }
    stream += block;
  } while (!bytes.empty());
  return stream + check;
}

}  // namespace

std::string to_png(const Image& image) {
  const int64_t channels = image.pixels.size(0), height = image.pixels.size(1), width = image.pixels.size(2);
  const at::Tensor rows = image.pixels.permute({1, 2, 0}).contiguous();
  const auto* pixels = reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>());
  const auto row_bytes = static_cast<size_t>(width * channels);
  std::string data;
  for (int64_t row = 0; row < height; ++row) {
    data += '\0';  // the row's filter: none
    data.append(pixels + static_cast<size_t>(row) * row_bytes, row_bytes);
  }
  const char color_type = channels == 1 ? 0 : channels == 3 ? 2 : 6;
  const std::string header = big_endian(static_cast<uint32_t>(width)) + big_endian(static_cast<uint32_t>(height)) +
                             std::string{8, color_type, 0, 0, 0};
  return "\x89PNG\r\n\x1A\n" + chunk("IHDR", header) + chunk("IDAT", stored(data)) + chunk("IEND", "");
}

}  // namespace fulgur
