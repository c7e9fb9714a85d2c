#include "fulgur/base/readable_bytes.h"

#include <fmt/format.h>

namespace fulgur {

std::string readable_bytes(int64_t num_bytes) {
  constexpr double kMb = 1e6;
  return num_bytes < 100'000 ? fmt::format("{} B", num_bytes)
                             : fmt::format("{:.1f} MB", static_cast<double>(num_bytes) / kMb);
}

}  // namespace fulgur
