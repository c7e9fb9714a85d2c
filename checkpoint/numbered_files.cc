#include "fulgur/checkpoint/numbered_files.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

namespace fulgur {
namespace {

namespace fs = std::filesystem;

// The last file that exists, empty if none does, and the first that does not.
std::pair<fs::path, fs::path> last_and_next(const fs::path& folder, std::string_view stem, std::string_view extension) {
  std::error_code error;  // a file that cannot be looked at does not exist
  fs::path last, next = folder / fmt::format("{}{}", stem, extension);
  for (int i = 1; fs::exists(next, error); ++i) {
    last = std::exchange(next, folder / fmt::format("{}-v{}{}", stem, i, extension));
  }
  return {last, next};
}

}  // namespace

fs::path last_numbered(const fs::path& folder, std::string_view stem, std::string_view extension) {
  return last_and_next(folder, stem, extension).first;
}

fs::path next_numbered(const fs::path& folder, std::string_view stem, std::string_view extension) {
  return last_and_next(folder, stem, extension).second;
}

}  // namespace fulgur
