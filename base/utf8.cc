#include "fulgur/base/utf8.h"

#include <algorithm>
#include <cstddef>

namespace fulgur {
namespace {

bool is_between(char byte, unsigned char lowest, unsigned char highest) {
  const auto value = static_cast<unsigned char>(byte);
  return value >= lowest && value <= highest;
}

// The length of the character that the bytes begin with; 0 if they begin with none.
size_t length_of_first(std::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes.front());
  if (lead < 0x80) return 1;
  const size_t length = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length == 0 || bytes.size() < length) return 0;
  const unsigned char lowest = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char highest = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (!is_between(bytes[1], lowest, highest)) return 0;
  const auto is_tail = [](char byte) { return is_between(byte, 0x80, 0xbf); };
  return std::ranges::all_of(bytes.substr(2, length - 2), is_tail) ? length : 0;
}

}  // namespace

bool is_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t length = length_of_first(bytes);
    if (length == 0) return false;
    bytes.remove_prefix(length);
  }
  return true;
}

}  // namespace fulgur
