#include "fulgur/base/working_directory.h"

#include <cstdlib>

namespace fulgur {

std::filesystem::path working_directory() {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  return folder != nullptr ? std::filesystem::path(folder) : std::filesystem::current_path();
}

}  // namespace fulgur
