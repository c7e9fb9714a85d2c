#pragma once

#include <string_view>

namespace fulgur {

// Whether the bytes are UTF-8: no overlong form, no surrogate, nothing above U+10FFFF. Source: RFC 3629, section 4.
bool is_utf8(std::string_view bytes);

}  // namespace fulgur
