#include "fulgur/base/working_directory.h"

#include <cstdlib>
#include <string>

namespace fulgur {

std::filesystem::path working_directory() {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  return folder != nullptr ? std::filesystem::path(folder) : std::filesystem::current_path();
}

std::filesystem::path short_path(const std::filesystem::path& path) {
  const std::filesystem::path relative = std::filesystem::proximate(path);
  return relative.string().starts_with("..") ? path : relative;
}

}  // namespace fulgur
