#pragma once

#include <filesystem>

namespace fulgur {

// Unpacks `compressed` (gzip, bzip2, xz, zstd or lz4; an uncompressed file is copied) into `folder`, unless that is
// done already, and returns the unpacked file. Its name contains a hash of the path, the size and the modification time
// of `compressed`; it appears complete or not at all. If several processes do this at once, each unpacks, and all take
// the file of the first that finishes. Takes constant memory, the time to decompress, and the disk space of the result,
// which fulgur never removes. Throws CheckpointError or std::runtime_error, naming the file and the reason, if
// `compressed` cannot be read, is cut off or damaged.
std::filesystem::path unpack_once(const std::filesystem::path& compressed, const std::filesystem::path& folder);

}  // namespace fulgur
