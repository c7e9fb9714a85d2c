#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>

namespace fulgur {

// A new file, written from start to end. Every failure is a CheckpointError that names the path and the system's
// reason.
class FileWriter {
 public:
  explicit FileWriter(std::filesystem::path path);  // fails if the file exists
  ~FileWriter();                                    // closes; what was not synced may be lost
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t num_bytes);
  void sync_and_close();

 private:
  std::filesystem::path path_;
  int descriptor_;
};

// Makes `folder` appear whole or not at all, whenever the process or the machine stops: `fill` writes into a temporary
// folder beside it, which is synced and renamed. The files that `fill` writes must be synced by it. Parent folders are
// made. Throws CheckpointError if `folder` exists; if `fill` throws, the temporary folder is removed.
void create_folder_atomically(const std::filesystem::path& folder,
                              const std::function<void(const std::filesystem::path& temporary)>& fill);

}  // namespace fulgur
