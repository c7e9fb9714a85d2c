#include "checkpoint/file_system.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(std::string_view action, const fs::path& path, int error) {
  throw CheckpointError(
      fmt::format("cannot {} '{}': {}", action, path.string(), std::generic_category().message(error)));
}

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail("open", folder, errno);
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (error != 0) fail("sync", folder, error);
}

void make_folders(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("make the folder", folder, error.value());
}

}  // namespace

FileWriter::FileWriter(fs::path path)
    : path_(std::move(path)), descriptor_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) fail("create", path_, errno);
}

FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileWriter::write(const void* data, size_t num_bytes) {
  const char* position = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::write(descriptor_, position, num_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", path_, errno);
    position += written;
    num_bytes -= static_cast<size_t>(written);
  }
}

void FileWriter::sync_and_close() {
  if (::fsync(descriptor_) != 0) fail("sync", path_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("close", path_, errno);
}

void create_folder_atomically(const fs::path& folder, const std::function<void(const fs::path&)>& fill) {
  const fs::path target = fs::absolute(folder).lexically_normal();
  const fs::path parent = target.has_filename() ? target.parent_path() : target.parent_path().parent_path();
  if (fs::exists(target)) fail("make the folder", target, EEXIST);
  make_folders(parent);
  const fs::path temporary = parent / fmt::format(".{}.tmp-{}", target.filename().string(), ::getpid());
  fs::remove_all(temporary);  // left by an interrupted process of the same number
  make_folders(temporary);
  try {
    fill(temporary);
    sync_folder(temporary);
    if (::rename(temporary.c_str(), target.c_str()) != 0) fail("rename to", target, errno);
    sync_folder(parent);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
}

}  // namespace fulgur
