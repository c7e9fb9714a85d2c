#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// Every failure in this file is a CheckpointError that names the path and the system's reason.

// Identifies the content of a file.
struct FileDigest {
  int64_t num_bytes = 0;
  uint64_t xxh3 = 0;  // XXH3_64bits of all bytes, seed 0; https://github.com/Cyan4973/xxHash
  bool operator==(const FileDigest&) const = default;
};

// Writes a new file from start to end. Small writes are buffered; size and hash are computed on the way.
class FileWriter {
 public:
  explicit FileWriter(std::filesystem::path path);  // fails if the file exists
  // A file that will be renamed: errors name `final_path`.
  FileWriter(const std::filesystem::path& path, std::filesystem::path final_path);
  ~FileWriter();  // closes the file; data that was not synced may be lost
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  const std::filesystem::path& path() const { return path_; }  // the final path
  void write(const void* data, size_t num_bytes);
  FileDigest sync_and_close();  // returns when all data is on disk

 private:
  struct Buffer;

  void write_through(std::string_view bytes);

  std::filesystem::path path_;
  int descriptor_;
  std::unique_ptr<Buffer> buffer_;
};

// Writes a new file with these bytes and syncs it, but not its folder.
FileDigest write_file(const std::filesystem::path& path, std::string_view bytes);

// Like write_file(), but throws for more than `max_bytes`, which read_text_file() with that limit would refuse.
FileDigest write_text_file(const std::filesystem::path& path, std::string_view text, int64_t max_bytes);

// Reads the whole file; `on_read` gets the number of bytes read so far.
FileDigest digest_of(const std::filesystem::path& path, const std::function<void(int64_t)>& on_read = {});

// Reads the whole file. Throws for a file above `max_bytes` before memory is allocated, and for what is no regular
// file.
std::string read_text_file(const std::filesystem::path& path, int64_t max_bytes);

// Creates the folder and its parents, durably against a power cut; does nothing if the folder exists.
void make_folders(const std::filesystem::path& folder);
std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder);
void sync_folder(const std::filesystem::path& folder);  // makes its entries durable against a power cut

// Throws the CheckpointError: "cannot <action> '<path>': <the system's text for errno `error`>".
[[noreturn]] void throw_system_error(std::string_view action, const std::filesystem::path& path, int error);

}  // namespace fulgur
