#pragma once

#include <string_view>

namespace fulgur {

// Whether a path in an archive points out of the folder into which the archive would be unpacked: "/etc/a",
// "a/../../b".
inline bool leaves_folder(std::string_view path) {
  if (path.starts_with('/')) return true;
  while (true) {
    const size_t end = path.find('/');
    if (path.substr(0, end) == "..") return true;
    if (end == std::string_view::npos) return false;
    path.remove_prefix(end + 1);
  }
}

}  // namespace fulgur
