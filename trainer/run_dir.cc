#include "trainer/run_dir.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/working_directory.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "version_";

int64_t next_version(const fs::path& runs) {
  int64_t next = 0;
  for (const auto& entry : fs::directory_iterator(runs)) {
    const std::string name = entry.path().filename().string();
    int64_t version = 0;
    if (!name.starts_with(kPrefix)) continue;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), version);
    next = std::max(next, version + 1);
  }
  return next;
}

}  // namespace

fs::path make_run_dir(const fs::path& root) {
  const fs::path runs = (root.empty() ? working_directory() : root) / "runs";
  fs::create_directories(runs);
  for (int64_t version = next_version(runs);; ++version) {
    const fs::path folder = runs / fmt::format("{}{}", kPrefix, version);
    if (fs::create_directory(folder)) return folder;  // false: another process was first
  }
}

}  // namespace fulgur
