#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// One tensor of a safetensors file.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // as in the file: "F32", "BF16", "I64", "F8_E4M3", ...; possibly unknown to us
  std::vector<int64_t> shape;  // empty for a scalar
  int64_t begin = 0, end = 0;  // bytes, counted from the end of the header

  int64_t numel() const;
};

// The header of a safetensors file: which tensors there are and where their bytes lie.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in byte order
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // offset in the file where the bytes of the tensors begin
};

// Checks and reads the header of a file. `bytes` is the start of the file and holds at least the whole header.
// Allocates nothing larger than the header. Throws CheckpointError, naming `file`, the tensor and the reason: the
// header is longer than the file or than 100 MB, is no JSON of the right form, or has a name twice; a shape is
// negative, too large or does not fit the byte range; byte ranges overlap, leave a hole or do not end with the file.
// Source: https://github.com/huggingface/safetensors, "Format", and its validate() in tensor.rs.
SafetensorsHeader parse_safetensors_header(std::span<const char> bytes, int64_t file_bytes, std::string_view file);

}  // namespace fulgur
