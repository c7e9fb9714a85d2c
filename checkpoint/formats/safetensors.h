#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/safetensors_header.h"
#include "fulgur/checkpoint/memory_map.h"

namespace fulgur {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Writes `tensors` as a safetensors file, which appears complete or not at all (TemporaryFile) and is synced. Tensors
// with the largest elements come first, so that all are aligned, otherwise in the given order. One tensor at a time is
// made contiguous and copied to the host. Throws CheckpointError if the file cannot be written or a dtype or name
// cannot be expressed. Source: https://github.com/huggingface/safetensors, "Format".
FileDigest write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors,
                             const std::map<std::string, std::string>& metadata = {});

// Writes into a file that the caller has created and will sync.
void write_safetensors(FileWriter& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// The name of a dtype in safetensors files: "F32" for at::kFloat. Throws CheckpointError if there is none.
std::string_view safetensors_dtype(at::ScalarType dtype);

// A safetensors file, mapped into memory: only the parts in use are read. The file must not be changed or truncated
// while this object or one of its tensors lives; renaming or deleting it is fine. Threading: const methods may be
// called from several threads. Errors: CheckpointError that names file, tensor and reason.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);  // checks the whole header: parse_safetensors_header()

  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }  // in byte order
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(std::string_view name) const;  // null if there is none

  // The tensor on the CPU: a view that keeps the mapping alive, or a copy if the file's bytes are not aligned. Writing
  // to the tensor never changes the file. Throws if no tensor has this name, or its dtype is unknown.
  at::Tensor tensor(std::string_view name) const;

 private:
  const SafetensorsEntry& entry(std::string_view name) const;
  [[noreturn]] void fail(std::string_view name, std::string_view reason) const;

  std::filesystem::path path_;
  std::shared_ptr<const MemoryMap> map_;
  SafetensorsHeader header_;
  std::map<std::string, size_t, std::less<>> index_;  // position in the entries, by name
};

}  // namespace fulgur
