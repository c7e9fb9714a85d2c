#include "fulgur/base/version.h"

#include <fmt/format.h>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

// The part of a version within which headers and library fit each other: "0.1" of "0.1.7".
std::string_view without_patch(std::string_view version) { return version.substr(0, version.rfind('.')); }

}  // namespace

std::string_view version() { return FULGUR_VERSION; }

bool internal::check_version(std::string_view version_of_headers) {
  if (without_patch(version_of_headers) == without_patch(FULGUR_VERSION)) return true;
  throw UsageError(
      fmt::format("a file of this program was compiled with the headers of fulgur {}, but the program runs with the "
                  "library of fulgur {}; compile all of it with the headers that were installed with the library",
                  version_of_headers, FULGUR_VERSION));
}

}  // namespace fulgur
