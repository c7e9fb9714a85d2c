#include "fulgur/base/crc32.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace fulgur {
namespace {

// tables[k][b]: the check of the byte b followed by k zero bytes, so that eight bytes are taken at once.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables(uint32_t reflected_polynomial) {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t check = byte;
    for (int bit = 0; bit < 8; ++bit) check = (check >> 1) ^ ((check & 1) != 0 ? reflected_polynomial : 0);
    tables[0][byte] = check;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (size_t k = 1; k < 8; ++k) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

uint32_t check_of(const Tables& tables, std::string_view bytes) {
  static_assert(std::endian::native == std::endian::little);
  uint32_t check = ~uint32_t{0};
  while (bytes.size() >= 8) {
    uint64_t next = 0;
    std::memcpy(&next, bytes.data(), 8);
    next ^= check;
    check = 0;
    for (size_t k = 0; k < 8; ++k) check ^= tables[7 - k][(next >> (8 * k)) & 0xFF];
    bytes.remove_prefix(8);
  }
  for (const char byte : bytes) check = (check >> 8) ^ tables[0][(check ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~check;
}

}  // namespace

uint32_t crc32(std::string_view bytes) {
  static constexpr Tables kTables = make_tables(0xEDB88320);
  return check_of(kTables, bytes);
}

uint32_t crc32c(std::string_view bytes) {
  static constexpr Tables kTables = make_tables(0x82F63B78);
  return check_of(kTables, bytes);
}

}  // namespace fulgur
