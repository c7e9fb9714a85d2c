#include "fulgur/base/listed.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>

namespace fulgur {

std::string listed(std::vector<std::string> items) {
  constexpr size_t kMost = 10;
  const size_t left_out = items.size() - std::min(items.size(), kMost);
  items.resize(items.size() - left_out);
  return fmt::format("{}{}", fmt::join(items, ", "), left_out > 0 ? fmt::format(" and {} more", left_out) : "");
}

}  // namespace fulgur
