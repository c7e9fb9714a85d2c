#include "fulgur/checkpoint/formats/write_archive.h"

#include <fmt/format.h>

#include <exception>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"

namespace fulgur {

FileDigest write_archive(const std::filesystem::path& path,
                         const std::function<void(caffe2::serialize::PyTorchStreamWriter&)>& fill) {
  TemporaryFile file(path);
  // A write error must not propagate through the archive's C code. After an error all further bytes are dropped but
  // reported as written: an archive that sees a failure throws from its destructor.
  std::exception_ptr error;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t num_bytes) {
    try {
      if (error == nullptr) file.writer().write(data, num_bytes);
    } catch (...) {
      error = std::current_exception();
    }
    return num_bytes;
  });
  try {
    fill(archive);
    archive.writeEndOfFile();
  } catch (const c10::Error& archive_error) {
    if (error == nullptr) {
      throw CheckpointError(fmt::format("{}: {}", path.string(), archive_error.what_without_backtrace()));
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
  return file.commit();
}

}  // namespace fulgur
