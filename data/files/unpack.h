#pragma once

#include <filesystem>

namespace fulgur {

// The file that `compressed` (gzip, bzip2, xz, zstd or lz4; an uncompressed file is copied) holds, unpacked into
// `folder` unless it is there already. Its name contains a hash of the path, the size and the time of change of
// `compressed`; it appears complete or not at all. Several processes may do this at once: each unpacks, and all take
// the file of the first that is done. Takes constant memory, the time to decompress, and the disk space of the result,
// which nobody removes. Throws CheckpointError or
// std::runtime_error, naming the file and the reason, if it cannot be read, is cut off or damaged.
std::filesystem::path unpack_once(const std::filesystem::path& compressed, const std::filesystem::path& folder);

}  // namespace fulgur
