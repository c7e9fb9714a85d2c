#include "fulgur/callbacks/appended_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "fulgur/base/crc32.h"
#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/checkpoint/numbered_files.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

std::string free_name(const fs::path& folder, const fs::path& wanted) {
  return next_numbered(folder, wanted.stem().string(), wanted.extension().string()).filename();
}

// The checksum of up to 1 KiB before `size`, by which one finds that a file is another one; nullopt if it is shorter.
std::optional<int64_t> checksum_before(const fs::path& path, int64_t size) {
  std::string end(static_cast<size_t>(std::min<int64_t>(size, 1024)), '\0');
  std::ifstream file(path, std::ios::binary);
  file.seekg(size - static_cast<int64_t>(end.size()));
  if (!file.read(end.data(), static_cast<std::streamsize>(end.size()))) return std::nullopt;
  return crc32c(end);
}

}  // namespace

void AppendedFile::open_in(const fs::path& folder, const std::string& name) {
  if (is_open()) return;
  if (!path_.empty() && path_ != folder / name_) forget();  // the file of an earlier Trainer
  if (const auto saved = std::exchange(saved_checksum_, std::nullopt)) {
    const bool is_another_runs = fs::exists(folder / name_) && checksum_before(folder / name_, size_) != saved;
    if (is_another_runs) {
      name_.clear();
      size_ = 0;
    }
  }
  if (name_.empty()) name_ = free_name(folder, name);
  path_ = folder / name_;
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (!is_open()) return warn(errno);
  size_ = std::min<int64_t>(size_, ::lseek(descriptor_, 0, SEEK_END));
  if (::ftruncate(descriptor_, size_) != 0) warn(errno);
}

void AppendedFile::close() {
  if (is_open()) ::close(std::exchange(descriptor_, -1));
}

void AppendedFile::forget() {
  close();
  path_.clear();
  name_.clear();
  size_ = 0;
  saved_checksum_.reset();
}

void AppendedFile::append(std::string_view piece) {
  if (!is_open()) return;
  size_t written = 0;
  while (written < piece.size()) {
    const auto end = static_cast<off_t>(size_) + static_cast<off_t>(written);
    const ssize_t count = ::pwrite(descriptor_, piece.data() + written, piece.size() - written, end);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      warn(errno);
      if (::ftruncate(descriptor_, size_) != 0) close();
      return;
    }
    written += static_cast<size_t>(count);
  }
  size_ += static_cast<int64_t>(piece.size());
}

void AppendedFile::cut(int64_t num_bytes) {
  size_ = num_bytes;
  if (is_open() && ::ftruncate(descriptor_, size_) != 0) warn(errno);
}

void AppendedFile::warn(int error) {
  if (std::exchange(has_warned_, true)) return;
  log_warning("{}: cannot write '{}': {}; training continues without the entries that cannot be written", owner_,
              path_.string(), std::generic_category().message(error));
}

State AppendedFile::state() const {
  State state;
  if (name_.empty()) return state;
  state.set("file", name_);
  state.set("num_bytes", size_);
  const auto checksum = saved_checksum_ ? saved_checksum_ : checksum_before(path_, size_);
  if (checksum) state.set("checksum", *checksum);
  return state;
}

// The state may come from another user, with any path in it: only a name in the folder is taken.
void AppendedFile::load_state(const State& state) {
  const auto& name = state.get<std::string>("file");
  const auto num_bytes = state.get<int64_t>("num_bytes");
  if (name.empty() || fs::path(name).filename() != name || name == "." || name == ".." || num_bytes < 0) {
    throw CheckpointError(
        fmt::format("the state of {} names '{}' of {} bytes, which is no file", owner_, name, num_bytes));
  }
  name_ = name;
  if (!is_open()) {
    path_.clear();
    const auto* checksum = state.find<int64_t>("checksum");
    saved_checksum_ = checksum != nullptr ? std::optional(*checksum) : std::nullopt;
  }
  cut(num_bytes);
}

}  // namespace fulgur
