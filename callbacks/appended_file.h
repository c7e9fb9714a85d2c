#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "fulgur/base/state.h"

namespace fulgur {

// A file to which a logger appends pieces, each whole or not at all: if the disk is full, the part of a piece that was
// written is cut off again. The first failure is a warning; training continues, and later pieces are tried again.
class AppendedFile {
 public:
  explicit AppendedFile(std::string_view owner) : owner_(owner) {}  // the name for messages
  ~AppendedFile() { close(); }
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  // Opens a file in the folder. The file that was open there before, in this process or when the loaded state was
  // saved, is continued after the pieces that it had then; but if a loaded state does not fit the bytes of the file,
  // the file belongs to another run and is left alone. Otherwise creates `name`, or, if that exists, a file with -v1,
  // -v2, ... before the extension. If opening fails, a warning is logged, and append() drops everything.
  void open_in(const std::filesystem::path& folder, const std::string& name);
  void close();
  void forget();  // as if no file had been opened
  bool is_open() const { return descriptor_ >= 0; }
  bool has_begun() const { return size_ > 0; }  // there are pieces

  void append(std::string_view piece);
  void cut(int64_t num_bytes);  // drops what follows; a piece must end there

  int64_t size() const { return size_; }  // bytes

  const std::filesystem::path& path() const { return path_; }  // empty before open_in()

  State state() const;                  // empty before open_in()
  void load_state(const State& state);  // drops later pieces; throws CheckpointError if the state names no file

 private:
  void warn(int error);

  const std::string owner_;
  std::filesystem::path path_{};
  std::string name_{};
  int descriptor_ = -1;
  int64_t size_ = 0;
  std::optional<int64_t>
      saved_checksum_{};  // the end of the file that a loaded state names; nullopt once the file is opened
  bool has_warned_ = false;
};

}  // namespace fulgur
