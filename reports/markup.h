#pragma once

#include <string>
#include <string_view>

namespace fulgur {

// `text` as a part of HTML or SVG, also within quotes: markup is escaped, and bytes that are not UTF-8 are replaced by
// U+FFFD.
std::string escape_html(std::string_view text);

}  // namespace fulgur
