#include "fulgur/data/images/exif.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>

namespace fulgur {
namespace {

using Bytes = std::span<const uint8_t>;

constexpr std::array<uint8_t, 6> kExifName{'E', 'x', 'i', 'f', 0, 0};
constexpr uint8_t kApp1 = 0xe1, kEndOfImage = 0xd9, kStartOfScan = 0xda;
constexpr uint16_t kTiffVersion = 42, kOrientationTag = 0x112, kShortType = 3;
constexpr uint64_t kEntryBytes = 12;

// Numbers of a block whose byte order is given; 0 where the block has ended.
struct Numbers {
  Bytes bytes;
  bool is_big_endian;

  uint32_t at(uint64_t position, uint64_t num_bytes) const {
    if (position > bytes.size() || num_bytes > bytes.size() - position) return 0;
    uint32_t number = 0;
    for (uint64_t i = 0; i < num_bytes; ++i) {
      number = number << 8 | bytes[position + (is_big_endian ? i : num_bytes - 1 - i)];
    }
    return number;
  }
};

// What follows the name of the first EXIF segment: a TIFF file without pictures.
std::optional<Bytes> find_exif(Bytes jpeg) {
  const Numbers numbers{jpeg, true};
  uint64_t position = 2;  // after the marker that begins the file
  while (position + 4 <= jpeg.size() && jpeg[position] == 0xff) {
    const uint8_t marker = jpeg[position + 1];
    if (marker == 0xff) {  // a byte that fills up
      ++position;
      continue;
    }
    if (marker == kStartOfScan || marker == kEndOfImage) break;
    const uint64_t length = numbers.at(position + 2, 2);  // counts its own two bytes
    if (length < 2 || length > jpeg.size() - position - 2) break;
    const Bytes content = jpeg.subspan(position + 4, length - 2);
    if (marker == kApp1 && content.size() > kExifName.size() &&
        std::ranges::equal(content.first(kExifName.size()), kExifName)) {
      return content.subspan(kExifName.size());
    }
    position += 2 + length;
  }
  return std::nullopt;
}

}  // namespace

int exif_orientation(Bytes jpeg) {
  const std::optional<Bytes> exif = find_exif(jpeg);
  if (!exif.has_value() || exif->size() < 2) return 1;
  const Numbers tiff{*exif, (*exif)[0] == 'M'};
  if (tiff.at(2, 2) != kTiffVersion) return 1;
  const uint64_t directory = tiff.at(4, 4);
  const uint32_t num_entries = tiff.at(directory, 2);
  for (uint32_t i = 0; i < num_entries; ++i) {
    const uint64_t entry = directory + 2 + i * kEntryBytes;
    if (tiff.at(entry, 2) != kOrientationTag || tiff.at(entry + 2, 2) != kShortType) continue;
    const uint32_t orientation = tiff.at(entry + 8, 2);
    return orientation >= 1 && orientation <= 8 ? static_cast<int>(orientation) : 1;
  }
  return 1;
}

}  // namespace fulgur
