#pragma once

#include <caffe2/serialize/inline_container.h>

#include <filesystem>
#include <functional>

#include "fulgur/checkpoint/file_system.h"

namespace fulgur {

// Writes a zip file as libtorch does (aligned entries, nothing compressed), which appears complete or not at all.
// `fill` writes the records. Throws CheckpointError if the file cannot be written.
FileDigest write_archive(const std::filesystem::path& path,
                         const std::function<void(caffe2::serialize::PyTorchStreamWriter&)>& fill);

}  // namespace fulgur
