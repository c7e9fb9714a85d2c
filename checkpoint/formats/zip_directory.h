#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace fulgur {

// Reads a range of a file's bytes; the range must lie within the file.
using ReadBytes = std::function<std::string(uint64_t begin, uint64_t num_bytes)>;

// Checks a zip file before libtorch's reader opens it, which allocates whatever size an entry claims. Throws
// CheckpointError, naming `file` and the reason, unless torch.save() may have written the file: it is no zip or has a
// comment, it is a TorchScript module, an entry is compressed, or the entries together have more bytes than the file.
// Locates the entries in the same way as libtorch's reader. Source:
// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3; libtorch's miniz.
void check_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file);

}  // namespace fulgur
