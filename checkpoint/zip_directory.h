#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace fulgur {

// Gives bytes of a file; the range lies in it.
using ReadBytes = std::function<std::string(uint64_t begin, uint64_t num_bytes)>;

// Looks at a zip file before libtorch's reader may, which allocates whatever an entry says it has. Throws
// CheckpointError, naming `file` and the reason, unless torch.save() may have written it: the file is no zip or has a
// comment, it is a TorchScript module, an entry is compressed, or all have more bytes together than the file. Finds the
// entries where that reader finds them. Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3;
// libtorch's miniz.
void check_zip_directory(const ReadBytes& read, uint64_t file_bytes, std::string_view file);

}  // namespace fulgur
