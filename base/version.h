#pragma once

#include <string_view>

// The version of fulgur, by semantic versioning: docs/versions.md says what may change between two versions. Builds,
// installations and programs read the number here.
#define FULGUR_VERSION_MAJOR 0
#define FULGUR_VERSION_MINOR 1
#define FULGUR_VERSION_PATCH 0

#define FULGUR_TEXT_OF_(number) #number
#define FULGUR_TEXT_OF(number) FULGUR_TEXT_OF_(number)
#define FULGUR_VERSION                 \
  FULGUR_TEXT_OF(FULGUR_VERSION_MAJOR) \
  "." FULGUR_TEXT_OF(FULGUR_VERSION_MINOR) "." FULGUR_TEXT_OF(FULGUR_VERSION_PATCH)

namespace fulgur {

// The version of the library that runs. FULGUR_VERSION is that of the headers; they may differ in the patch number
// where a program was linked to libfulgur.so.
std::string_view version();

namespace internal {

// Throws UsageError, which names both versions, unless the library fits headers of that version.
bool check_version(std::string_view version_of_headers);

// Checked when the program starts, for each of its files: before anything could be misread by another layout.
[[maybe_unused]] static const bool version_is_checked = check_version(FULGUR_VERSION);

}  // namespace internal
}  // namespace fulgur
