#include "fulgur/reports/terminal_text.h"

#include <clocale>
#include <cwchar>
#include <optional>

namespace fulgur {
namespace {

// Sets the locale of this thread to UTF-8, which wcwidth() asks for the width of a character; a program begins in "C".
class ScopedUtf8Locale {
 public:
  ScopedUtf8Locale() {
    static const locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
    if (utf8 != nullptr) before_ = uselocale(utf8);
  }
  ~ScopedUtf8Locale() {
    if (before_ != nullptr) uselocale(before_);
  }
  ScopedUtf8Locale(const ScopedUtf8Locale&) = delete;
  ScopedUtf8Locale& operator=(const ScopedUtf8Locale&) = delete;

 private:
  locale_t before_ = nullptr;
};

struct Character {
  size_t num_bytes = 1;
  std::optional<wchar_t> code{};  // nullopt: the byte begins no character of UTF-8
};

// Reads the first character of a text that is not empty.
Character first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {.code = static_cast<wchar_t>(first)};
  const size_t num_bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < num_bytes) return {};
  unsigned code = first & (0x7fu >> num_bytes);
  for (size_t i = 1; i < num_bytes; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return {};
    code = code << 6 | (byte(i) & 0x3fu);
  }
  const bool is_overlong = code < (num_bytes == 4 ? 0x10000u : num_bytes == 3 ? 0x800u : 0x80u);
  if (is_overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return {};
  return {.num_bytes = num_bytes, .code = static_cast<wchar_t>(code)};
}

// Calls `use` with the bytes and the columns of each character as a terminal may show it, until `use` returns false.
void for_each_character(std::string_view text, const auto& use) {
  const ScopedUtf8Locale locale;
  while (!text.empty()) {
    const Character character = first_character(text);
    const int width = character.code && *character.code != 0 ? wcwidth(*character.code) : -1;
    if (!(width < 0 ? use("?", 1) : use(text.substr(0, character.num_bytes), static_cast<size_t>(width)))) return;
    text.remove_prefix(character.num_bytes);
  }
}

}  // namespace

std::string terminal_text(std::string_view text, size_t width) {
  std::string kept;
  size_t num_columns = 0;
  for_each_character(text, [&](std::string_view bytes, size_t columns) {
    if (columns > width - num_columns) return false;
    kept += bytes;
    num_columns += columns;
    return true;
  });
  return kept;
}

size_t columns_of(std::string_view text) {
  size_t num_columns = 0;
  for_each_character(text, [&](std::string_view, size_t columns) {
    num_columns += columns;
    return true;
  });
  return num_columns;
}

std::string padded(std::string_view text, size_t width) {
  const std::string kept = terminal_text(text, width);
  return kept + std::string(width - columns_of(kept), ' ');
}

}  // namespace fulgur
