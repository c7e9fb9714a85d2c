#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace fulgur {

// A file mapped into memory: a page is read when it is first touched, and all processes that map the file share it.
// The file must not be changed or truncated while the map or a tensor of it lives (the system would end the process
// with SIGBUS); renaming or deleting it is fine. Threading: any.
class MemoryMap : public std::enable_shared_from_this<MemoryMap> {
 public:
  // Throws CheckpointError, with the path and the system's reason, if the file cannot be opened.
  static std::shared_ptr<const MemoryMap> open(const std::filesystem::path& path);
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::span<const char> bytes() const { return {data_, num_bytes_}; }

  // The bytes from `begin` on as a tensor on the CPU, which the caller has checked to lie within the file: a view that
  // keeps the map alive, or a copy if the bytes are not aligned. Writing to the tensor never changes the file.
  at::Tensor tensor(int64_t begin, at::IntArrayRef sizes, at::ScalarType dtype) const;

 private:
  explicit MemoryMap(const std::filesystem::path& path);
  int map(int descriptor);  // returns 0 or an errno

  std::filesystem::path path_;
  char* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace fulgur
