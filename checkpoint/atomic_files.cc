#include "fulgur/checkpoint/atomic_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = ".fulgur-tmp-", kLockSuffix = ".lock";
constexpr size_t kDigits = 16;

std::string new_name() {
  std::random_device random;
  return fmt::format("{}{:08x}{:08x}", kPrefix, random(), random());
}

bool is_lock_name(std::string_view name) {
  return name.ends_with(kLockSuffix) && is_temporary_name(name.substr(0, name.size() - kLockSuffix.size()));
}

fs::path lock_file_of(fs::path temporary) { return temporary += kLockSuffix; }

int open_lock_file(const fs::path& file, int flags) { return ::open(file.c_str(), O_RDWR | O_CLOEXEC | flags, 0644); }

enum class Locked { kYes, kNo, kNoLocksHere };

// `kind`: LOCK_SH to work on the entry, LOCK_EX to remove it.
Locked try_lock(int descriptor, int kind) {
  int result = 0;
  do {
    result = ::flock(descriptor, kind | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return Locked::kYes;
  return errno == EWOULDBLOCK ? Locked::kNo : Locked::kNoLocksHere;
}

// Whether the open lock file still has its name: the holder of the exclusive lock may have just removed the file.
bool has_name(int descriptor, const fs::path& file) {
  struct stat opened{}, named{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(file.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

bool lock_share(int descriptor, const fs::path& file) {
  return try_lock(descriptor, LOCK_SH) != Locked::kNo && has_name(descriptor, file);
}

void remove_or_warn(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log_warning("cannot remove '{}', which a save has left: {}", path.string(), error.message());
}

void remove_if_left_over(const fs::path& temporary) {
  const fs::path lock_file = lock_file_of(temporary);
  const int descriptor = open_lock_file(lock_file, 0);
  if (descriptor < 0) {
    if (errno == ENOENT) remove_or_warn(temporary);  // the lock file is created first and removed last
    return;
  }
  const Locked locked = try_lock(descriptor, LOCK_EX);
  static std::atomic<bool> told = false;
  if (locked == Locked::kNoLocksHere && !told.exchange(true)) {
    log_warning(
        "'{}' may be left by an interrupted save; this file system has no locks to tell. Remove it if no save is "
        "under way",
        temporary.string());
  }
  if (locked == Locked::kYes && has_name(descriptor, lock_file)) {
    remove_or_warn(temporary);
    remove_or_warn(lock_file);
  }
  ::close(descriptor);
}

// The path without links in its parent, as the system reads it: "link/../a" lies where the link leads. A link at the
// path itself stays, because it may be what is to be replaced.
fs::path absolute_target(const fs::path& path) {
  fs::path target = fs::absolute(path);
  if (!target.has_filename()) target = target.parent_path();  // "a/" is a
  const bool is_special = target.filename() == "." || target.filename() == "..";
  return is_special ? fs::weakly_canonical(target) : fs::weakly_canonical(target.parent_path()) / target.filename();
}

// Creates the parents of `target`, a folder that must not exist, removes leftovers there, and returns the parent.
fs::path parent_of_new(const fs::path& target) {
  if (fs::exists(target)) throw_system_error("make the folder", target, EEXIST);
  make_folders(target.parent_path());
  remove_temporary_folders(target.parent_path());
  return target.parent_path();
}

// Like parent_of_new(), for a file whose folder must exist.
fs::path parent_of_new_file(const fs::path& target) {
  if (fs::exists(fs::symlink_status(target))) throw_system_error("create", target, EEXIST);
  if (!fs::exists(target.parent_path())) throw_system_error("create", target, ENOENT);
  remove_temporary_folders(target.parent_path());
  return target.parent_path();
}

// Plain rename() would replace an empty folder.
void rename_to_free_name(const fs::path& from, const fs::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) throw_system_error("rename to", to, errno);
  if (fs::exists(to)) throw_system_error("rename to", to, EEXIST);  // this file system has no RENAME_NOREPLACE
  if (::rename(from.c_str(), to.c_str()) != 0) throw_system_error("rename to", to, errno);
}

}  // namespace

bool is_temporary_name(std::string_view name) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return name.size() == kPrefix.size() + kDigits && name.starts_with(kPrefix) &&
         std::all_of(name.begin() + kPrefix.size(), name.end(), is_digit);
}

TemporaryName::TemporaryName(fs::path path, int lock_flags, bool is_maker)
    : path_(std::move(path)), lock_(open_lock_file(lock_file_of(path_), lock_flags)), is_maker_(is_maker) {
  if (lock_ < 0) throw_system_error(is_maker ? "create" : "open", lock_file_of(path_), errno);
}

TemporaryName::TemporaryName(TemporaryName&& other) noexcept
    : path_(std::move(other.path_)),
      lock_(std::exchange(other.lock_, -1)),
      is_maker_(std::exchange(other.is_maker_, false)) {}

TemporaryName::~TemporaryName() {
  if (is_maker_) {
    remove_or_warn(path_);
    remove_or_warn(lock_file_of(path_));
  }
  if (lock_ >= 0) ::close(lock_);
}

TemporaryName TemporaryName::make(const fs::path& parent) {
  while (true) {
    TemporaryName name(absolute_target(parent) / new_name(), O_CREAT | O_EXCL, true);
    if (lock_share(name.lock_, lock_file_of(name.path_))) return name;  // otherwise another process has just removed it
  }
}

TemporaryName TemporaryName::share(const fs::path& path) {
  TemporaryName name(absolute_target(path), 0, false);
  if (lock_share(name.lock_, lock_file_of(name.path_))) return name;
  throw CheckpointError(fmt::format("'{}' is being removed by another process", name.path_.string()));
}

TemporaryFolder::TemporaryFolder(const fs::path& target)
    : target_(absolute_target(target)), name_(TemporaryName::make(parent_of_new(target_))) {
  std::error_code error;
  fs::create_directory(path(), error);
  if (error) throw_system_error("make the folder", path(), error.value());
}

void TemporaryFolder::commit() {
  sync_folder(path());
  rename_to_free_name(path(), target_);
  sync_folder(target_.parent_path());
}

TemporaryFile::TemporaryFile(const fs::path& target)
    : target_(absolute_target(target)),
      name_(TemporaryName::make(parent_of_new_file(target_))),
      writer_(name_.path(), target) {}

FileDigest TemporaryFile::commit() {
  const FileDigest digest = writer_.sync_and_close();
  rename_to_free_name(name_.path(), target_);
  sync_folder(target_.parent_path());
  return digest;
}

void replace_file_atomically(const fs::path& path, const std::function<void(FileWriter&)>& fill) {
  const fs::path target = absolute_target(path);
  if (!fs::exists(target.parent_path())) throw_system_error("write", path, ENOENT);
  remove_temporary_folders(target.parent_path());
  const TemporaryName temporary = TemporaryName::make(target.parent_path());
  FileWriter writer(temporary.path(), path);
  fill(writer);
  writer.sync_and_close();
  if (::rename(temporary.path().c_str(), target.c_str()) != 0) throw_system_error("replace", target, errno);
  sync_folder(target.parent_path());
}

void replace_link_atomically(const fs::path& link, const fs::path& target) {
  const fs::path place = absolute_target(link);
  if (fs::exists(fs::symlink_status(place)) && !fs::is_symlink(place)) throw_system_error("replace", place, EEXIST);
  const TemporaryName temporary = TemporaryName::make(place.parent_path());
  std::error_code error;
  fs::create_directory_symlink(target, temporary.path(), error);
  if (error) throw_system_error("make the link", place, error.value());
  if (::rename(temporary.path().c_str(), place.c_str()) != 0) throw_system_error("replace", place, errno);
  sync_folder(place.parent_path());
}

void remove_temporary_folders(const fs::path& parent) {
  if (!fs::exists(parent)) return;
  for (const fs::path& path : list_folder(parent)) {
    const std::string name = path.filename().string();
    if (is_temporary_name(name)) remove_if_left_over(path);
    if (is_lock_name(name)) remove_if_left_over(parent / path.stem());
  }
}

}  // namespace fulgur
