#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

#include "fulgur/checkpoint/file_system.h"

namespace fulgur {

// Files and folders that appear complete or not at all, whenever the process or the machine stops: each is created
// under a temporary name in the same folder, synced and renamed. Every failure is a CheckpointError that names the path
// and the system's reason.
//
// The temporary names are ".fulgur-tmp-<16 hex digits>". Each has a lock file "<name>.lock" next to it, on which every
// process that works on the entry holds a shared advisory lock (flock). The system releases the lock when the process
// ends, however it ends. So a process that gets the exclusive lock knows that the entry is left over. (Process numbers
// would not do: they are reused, and mean nothing on another host.)

// Whether the file or folder of this name is being written, or was left over.
bool is_temporary_name(std::string_view name);

// A temporary name that the process works on. On a file system without locks the name is not protected.
class TemporaryName {
 public:
  // Reserves a new name in an existing folder. The caller creates the file or folder; the destructor removes whatever
  // is still there under this name.
  static TemporaryName make(const std::filesystem::path& parent);

  // Holds a name that another rank has made and will remove, so that the entry is not taken for left over while any of
  // the ranks lives. Throws if `path` is no temporary name, or is being removed.
  static TemporaryName share(const std::filesystem::path& path);

  TemporaryName(TemporaryName&& other) noexcept;
  TemporaryName& operator=(TemporaryName&&) = delete;
  ~TemporaryName();  // logs a warning for what cannot be removed

  const std::filesystem::path& path() const { return path_; }  // absolute

 private:
  TemporaryName(std::filesystem::path path, int lock_flags, bool is_maker);

  std::filesystem::path path_;
  int lock_;  // the open lock file
  bool is_maker_;
};

// A folder that is filled under a temporary name, and removed at the end unless it was committed. One rank creates the
// folder; the other ranks write into path() and notify that rank when their files are synced.
class TemporaryFolder {
 public:
  // Creates the parent folders, and removes leftovers of interrupted saves next to `target`. Throws if `target` exists.
  explicit TemporaryFolder(const std::filesystem::path& target);
  const std::filesystem::path& path() const { return name_.path(); }  // absolute

  // The files in the folder must be synced (FileWriter). Syncs the folder, renames it to `target` and syncs the parent.
  // Throws also if `target` has appeared meanwhile: nothing is ever replaced.
  void commit();

 private:
  std::filesystem::path target_;
  TemporaryName name_;
};

// Like TemporaryFolder, for a file in a folder that exists.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target);
  FileWriter& writer() { return writer_; }

  // Syncs the file, renames it to `target` and syncs the parent.
  FileDigest commit();

 private:
  std::filesystem::path target_;
  TemporaryName name_;
  FileWriter writer_;
};

// Replaces the file, whose folder must exist, by what `fill` writes: after a crash the file has its old or its new
// content. Errors name `path`.
void replace_file_atomically(const std::filesystem::path& path, const std::function<void(FileWriter&)>& fill);

// Lets `link` point to `target`, a path relative to the link's folder. Throws if `link` exists and is not a link.
void replace_link_atomically(const std::filesystem::path& link, const std::filesystem::path& target);

// Removes what interrupted saves of fulgur have left in `parent`, which need not exist; never an entry that a living
// process works on. On a file system without locks nothing is removed. Logs a warning for what cannot be removed.
void remove_temporary_folders(const std::filesystem::path& parent);

}  // namespace fulgur
