#pragma once

#include <filesystem>
#include <functional>

#include "checkpoint/file_system.h"

namespace fulgur {

// Files and folders that are there whole or not at all, whenever the process or the machine stops: each is made under a
// temporary name beside its own, synced and renamed. Every failure is a CheckpointError that names the path and the
// system's reason.
//
// The temporary names are ".fulgur-tmp-<16 hex digits>". Beside each stands a file "<name>.lock", on which whoever
// works on it holds a share of an advisory lock (flock), which the system drops when the process ends, however it ends.
// So who gets the lock alone knows that an entry is left over. (Process numbers would not do: they are used again, and
// mean nothing on another host.)

// A temporary name that the process works on. On a file system without locks it protects nothing.
class TemporaryName {
 public:
  // A new one in an existing folder. The file or folder is for the caller to make; whatever is still there under this
  // name at the end is removed.
  static TemporaryName make(const std::filesystem::path& parent);

  // One that another rank has made and removes: holds it, so that it is not taken for left over while any of them
  // lives. Throws if it is no temporary name, or is being removed.
  static TemporaryName share(const std::filesystem::path& path);

  TemporaryName(TemporaryName&& other) noexcept;
  TemporaryName& operator=(TemporaryName&&) = delete;
  ~TemporaryName();  // warns of what cannot be removed

  const std::filesystem::path& path() const { return path_; }  // absolute

 private:
  TemporaryName(std::filesystem::path path, int lock_flags, bool is_maker);

  std::filesystem::path path_;
  int lock_;  // the open lock file
  bool is_maker_;
};

// A folder that is filled under a temporary name, and removed at the end unless it was committed. One rank makes it;
// the others write into path() and tell that rank when their files are synced.
class TemporaryFolder {
 public:
  // Makes its parents, and clears away what interrupted saves have left beside it. Throws if `target` exists.
  explicit TemporaryFolder(const std::filesystem::path& target);
  const std::filesystem::path& path() const { return name_.path(); }  // absolute

  // The files in it must be synced (FileWriter). Syncs the folder, renames it to `target` and syncs the parent. Throws
  // also if `target` has appeared meanwhile: nothing is ever replaced.
  void commit();

 private:
  std::filesystem::path target_;
  TemporaryName name_;
};

// TemporaryFolder for a file, in a folder that is there.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target);
  FileWriter& writer() { return writer_; }

  // Syncs the file too.
  FileDigest commit();

 private:
  std::filesystem::path target_;
  TemporaryName name_;
  FileWriter writer_;
};

// The file, in a folder that is there, has its old content or all that `fill` writes, of which errors name `path`.
void replace_file_atomically(const std::filesystem::path& path, const std::function<void(FileWriter&)>& fill);

// `link` points to `target`, which is relative to its folder, instead of to what it pointed to. Throws if it is there
// and no link.
void replace_link_atomically(const std::filesystem::path& link, const std::filesystem::path& target);

// Removes what interrupted saves of ours have left in `parent`, which need not exist; never what a living process works
// on. On a file system without locks that cannot be known, and all stays. Warns of what cannot be removed.
void remove_temporary_folders(const std::filesystem::path& parent);

}  // namespace fulgur
