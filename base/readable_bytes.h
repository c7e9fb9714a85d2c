#pragma once

#include <cstdint>
#include <string>

namespace fulgur {

std::string readable_bytes(int64_t num_bytes);  // "512 B", "12.3 MB"

}  // namespace fulgur
