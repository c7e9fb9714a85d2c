#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// One regular file in a tar archive.
struct TarEntry {
  std::string path;   // without a leading "./"
  int64_t begin = 0;  // offset of the content in the archive
  int64_t num_bytes = 0;
};

// The regular files of an archive, in its order: ustar (POSIX 1988), pax (paths and sizes, POSIX 2001), and GNU's long
// names and sizes. Folders are left out. Reads the headers and what follows the last file, which touches a page of a
// mapped archive per file, and allocates little more than the headers. Throws std::runtime_error, naming `archive_name`
// and the reason: it is no tar archive, damaged or cut off (an archive ends with blocks of zeros), has bytes after its
// end, a link, a device or a sparse file, a path that leaves the archive, or a path twice.
// Source: https://www.gnu.org/software/tar/manual/html_node/Standard.html;
// https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html
std::vector<TarEntry> read_tar_index(std::span<const char> archive, std::string_view archive_name);

}  // namespace fulgur
