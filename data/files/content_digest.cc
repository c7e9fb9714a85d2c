#include "fulgur/data/files/content_digest.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

namespace fulgur {

std::string hex_digest(std::string_view text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

std::string describe_content(const std::filesystem::path& path, std::span<const char> bytes) {
  constexpr size_t kEndBytes = 64 << 10;
  const size_t num_bytes = std::min(kEndBytes, bytes.size());
  const auto first = bytes.first(num_bytes), last = bytes.last(num_bytes);
  return fmt::format("{} {} {:016x} {:016x}\n", path.filename().string(), bytes.size(),
                     XXH3_64bits(first.data(), num_bytes), XXH3_64bits(last.data(), num_bytes));
}

}  // namespace fulgur
