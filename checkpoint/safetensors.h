#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fulgur {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Writes `tensors`, in this order, as a safetensors file and syncs it to disk. Each is made contiguous and brought to
// the host one at a time. Throws CheckpointError if the file cannot be written or a dtype or name cannot be expressed.
// Source: https://github.com/huggingface/safetensors, "Format".
void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace fulgur
