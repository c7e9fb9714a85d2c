#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// Reads a range of a file's bytes; the range must lie within the file.
using ReadBytes = std::function<std::string(uint64_t begin, uint64_t num_bytes)>;

// One entry of a zip file.
struct ZipEntry {
  std::string name;
  uint64_t num_bytes, stored_bytes;  // size when inflated, and size in the file
  uint64_t header_begin;             // offset of its local header
  uint32_t crc32;                    // checksum of the inflated bytes
  uint16_t method;                   // 0: stored as it is, 8: deflated
  bool is_encrypted;
};

// Reads the directory of a zip file, with sizes of zip64, and allocates little more than the directory. Throws
// CheckpointError, naming `file` and the reason, if it is no zip file or has a comment, or its entries have more bytes
// together than the file. Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.
std::vector<ZipEntry> read_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file);

// The offset of the entry's stored bytes, which lie within the file. Throws CheckpointError if they do not.
uint64_t zip_entry_begin(const ZipEntry& entry, const ReadBytes& read, uint64_t file_bytes, std::string_view file);

// Checks a zip file before libtorch's reader opens it, because that reader allocates whatever size an entry claims.
// Throws CheckpointError, naming `file` and the reason, if torch.save() cannot have written the file: it is no zip or
// has a comment, it is a TorchScript module, an entry is compressed, or the entries together have more bytes than the
// file.
// Locates the entries in the same way as libtorch's reader. Source:
// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3; libtorch's miniz.
void check_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file);

}  // namespace fulgur
