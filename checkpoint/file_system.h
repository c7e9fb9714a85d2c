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

// What a file must have, so that it is the one that was written.
struct FileDigest {
  int64_t num_bytes = 0;
  uint64_t xxh3 = 0;  // XXH3_64bits of all bytes, seed 0; https://github.com/Cyan4973/xxHash
  bool operator==(const FileDigest&) const = default;
};

// A new file, written from start to end. Small pieces are gathered; size and hash are taken on the way.
class FileWriter {
 public:
  explicit FileWriter(std::filesystem::path path);  // fails if the file exists
  // One that is going to be renamed: errors name `final_path`.
  FileWriter(const std::filesystem::path& path, std::filesystem::path final_path);
  ~FileWriter();  // closes; what was not synced may be lost
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  const std::filesystem::path& path() const { return path_; }  // the final one
  void write(const void* data, size_t num_bytes);
  FileDigest sync_and_close();  // once everything is on the disk

 private:
  struct Buffer;

  void write_through(std::string_view bytes);

  std::filesystem::path path_;
  int descriptor_;
  std::unique_ptr<Buffer> buffer_;
};

// A new file with these bytes, synced. The folder that it is in is not.
FileDigest write_file(const std::filesystem::path& path, std::string_view bytes);

// The same of at most `max_bytes`: what read_text_file() of that limit takes.
FileDigest write_text_file(const std::filesystem::path& path, std::string_view text, int64_t max_bytes);

// Reads the whole file, and tells `on_read` how many of its bytes it has read so far.
FileDigest digest_of(const std::filesystem::path& path, const std::function<void(int64_t)>& on_read = {});

// The whole file; one above `max_bytes` is refused before there is room made for it, and what is no file at once.
std::string read_text_file(const std::filesystem::path& path, int64_t max_bytes);

// And its parents, so that what is new survives a power cut; fine if it is there.
void make_folders(const std::filesystem::path& folder);
std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder);
void sync_folder(const std::filesystem::path& folder);  // so that its entries survive a power cut

// Throws the CheckpointError: "cannot <action> '<path>': <what the system says of errno `error`>".
[[noreturn]] void throw_system_error(std::string_view action, const std::filesystem::path& path, int error);

}  // namespace fulgur
