#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

namespace fulgur {

// Makes text from files safe to print: names of metrics and folders may hold anything. Each control character, each
// unassigned character and each byte that is no UTF-8 becomes '?'. The text is cut to `width` columns.
std::string terminal_text(std::string_view text, size_t width = std::numeric_limits<size_t>::max());

// The number of columns that terminal_text(text) takes: two for a character of Chinese or an emoji, none for an accent
// that combines with the letter before it.
size_t columns_of(std::string_view text);

// Returns terminal_text(text, width), followed by spaces up to `width` columns.
std::string padded(std::string_view text, size_t width);

}  // namespace fulgur
