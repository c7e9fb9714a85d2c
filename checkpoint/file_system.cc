#include "fulgur/checkpoint/file_system.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

// Fits in a core's L2 cache: the copy into the page cache finds there what the hash has just read.
constexpr size_t kChunkBytes = 256 << 10;

// After this many bytes the kernel is told to start writing to disk, instead of writing all at the end.
constexpr int64_t kWriteBackBytes = 4 << 20;

constexpr int kReadOnly = O_RDONLY | O_NONBLOCK;  // a named pipe without a writer opens at once

// An open file, closed at the end of the scope.
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : number_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (number_ < 0) throw_system_error("open", path, errno);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }

 private:
  int number_;
};

// Reads at most `num_bytes` from the current position; returns 0 at the end of the file.
size_t read_some(const Descriptor& file, const fs::path& path, char* data, size_t num_bytes) {
  while (true) {
    const ssize_t count = ::read(file.number(), data, num_bytes);
    if (count >= 0) return static_cast<size_t>(count);
    if (errno != EINTR) throw_system_error("read", path, errno);
  }
}

class Hash {
 public:
  Hash() { XXH3_64bits_reset(&state_); }
  void update(std::string_view bytes) { XXH3_64bits_update(&state_, bytes.data(), bytes.size()); }
  uint64_t value() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

void check_size(const fs::path& path, int64_t num_bytes, int64_t max_bytes) {
  if (num_bytes <= max_bytes) return;
  throw CheckpointError(
      fmt::format("'{}' has {} bytes; such a file has at most {}", path.string(), num_bytes, max_bytes));
}

}  // namespace

void throw_system_error(std::string_view action, const fs::path& path, int error) {
  throw CheckpointError(
      fmt::format("cannot {} '{}': {}", action, path.string(), std::generic_category().message(error)));
}

struct FileWriter::Buffer {
  Hash hash;
  int64_t num_bytes = 0;      // written to the descriptor so far
  int64_t write_back_at = 0;  // bytes for which write-back was started
  size_t used = 0;
  std::array<char, kChunkBytes> gathered;
};

FileWriter::FileWriter(fs::path path) : FileWriter(path, path) {}

FileWriter::FileWriter(const fs::path& path, fs::path final_path)
    : path_(std::move(final_path)),
      descriptor_(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)),
      buffer_(std::make_unique<Buffer>()) {
  if (descriptor_ < 0) throw_system_error("create", path_, errno);
}

FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileWriter::write(const void* data, size_t num_bytes) {
  Buffer& buffer = *buffer_;
  std::string_view bytes(static_cast<const char*>(data), num_bytes);
  if (buffer.used + bytes.size() > kChunkBytes) {
    write_through({buffer.gathered.data(), std::exchange(buffer.used, 0)});
    while (bytes.size() > kChunkBytes) {
      write_through(bytes.substr(0, kChunkBytes));
      bytes.remove_prefix(kChunkBytes);
    }
  }
  std::copy(bytes.begin(), bytes.end(), buffer.gathered.begin() + static_cast<ptrdiff_t>(buffer.used));
  buffer.used += bytes.size();
}

void FileWriter::write_through(std::string_view bytes) {
  buffer_->hash.update(bytes);
  buffer_->num_bytes += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_system_error("write", path_, errno);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  const int64_t waiting = buffer_->num_bytes - buffer_->write_back_at;
  if (waiting < kWriteBackBytes) return;
  ::sync_file_range(descriptor_, std::exchange(buffer_->write_back_at, buffer_->num_bytes), waiting,
                    SYNC_FILE_RANGE_WRITE);  // only a hint: fsync() is what counts
}

FileDigest FileWriter::sync_and_close() {
  write_through({buffer_->gathered.data(), std::exchange(buffer_->used, 0)});
  if (::fsync(descriptor_) != 0) throw_system_error("sync", path_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) throw_system_error("close", path_, errno);
  return {buffer_->num_bytes, buffer_->hash.value()};
}

FileDigest write_file(const fs::path& path, std::string_view bytes) {
  FileWriter file(path);
  file.write(bytes.data(), bytes.size());
  return file.sync_and_close();
}

FileDigest write_text_file(const fs::path& path, std::string_view text, int64_t max_bytes) {
  check_size(path, static_cast<int64_t>(text.size()), max_bytes);
  return write_file(path, text);
}

FileDigest digest_of(const fs::path& path, const std::function<void(int64_t)>& on_read) {
  const Descriptor file(path, kReadOnly);
  const auto buffer = std::make_unique<char[]>(kChunkBytes);
  Hash hash;
  int64_t num_bytes = 0;
  while (const size_t count = read_some(file, path, buffer.get(), kChunkBytes)) {
    hash.update({buffer.get(), count});
    num_bytes += static_cast<int64_t>(count);
    if (on_read) on_read(num_bytes);
  }
  return {num_bytes, hash.value()};
}

std::string read_text_file(const fs::path& path, int64_t max_bytes) {
  const Descriptor file(path, kReadOnly);
  struct stat status{};
  if (::fstat(file.number(), &status) != 0) throw_system_error("look at", path, errno);
  if (!S_ISREG(status.st_mode)) throw CheckpointError(fmt::format("'{}' is not a file", path.string()));
  check_size(path, status.st_size, max_bytes);
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const size_t count = read_some(file, path, text.data() + filled, text.size() - filled);
    if (count == 0) break;
    filled += count;
  }
  text.resize(filled);
  return text;
}

void make_folders(const fs::path& folder) {
  std::error_code error;
  fs::path missing = fs::absolute(folder);
  if (!missing.has_filename()) missing = missing.parent_path();  // "a/" is a
  std::vector<fs::path> parents;                                 // parents of the missing folders, innermost first
  for (; !fs::exists(missing, error); missing = missing.parent_path()) parents.push_back(missing.parent_path());
  fs::create_directories(folder, error);
  if (error) throw_system_error("make the folder", folder, error.value());
  for (const fs::path& parent : parents) sync_folder(parent);
}

std::vector<fs::path> list_folder(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); entry != fs::directory_iterator(); entry.increment(error)) {
    entries.push_back(entry->path());
  }
  if (error) throw_system_error("list", folder, error.value());
  return entries;
}

void sync_folder(const fs::path& folder) {
  const Descriptor descriptor(folder, O_RDONLY | O_DIRECTORY);
  if (::fsync(descriptor.number()) == 0) return;
  const bool has_no_sync = errno == EINVAL || errno == ENOTSUP;  // some file systems of networks, for folders
  if (!has_no_sync) throw_system_error("sync", folder, errno);
}

}  // namespace fulgur
