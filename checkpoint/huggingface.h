#pragma once

#include <filesystem>

#include "checkpoint/name_map.h"
#include "checkpoint/safetensors.h"

namespace fulgur {

// The tensors of a model as the Hugging Face hub has it, under the names that `names` makes of theirs: views of the
// files (SafetensorsFile). `path` is a .safetensors file, a model.safetensors.index.json, whose parts stand beside it,
// or a folder with one of them. Throws CheckpointError, naming file, tensor and reason: also if two names become one,
// or a part lacks a tensor that the index has there.
NamedTensors read_huggingface(const std::filesystem::path& path, const NameMap& names = {});

}  // namespace fulgur
