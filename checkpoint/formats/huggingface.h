#pragma once

#include <filesystem>

#include "fulgur/checkpoint/formats/name_map.h"
#include "fulgur/checkpoint/formats/safetensors.h"

namespace fulgur {

// The tensors of a model in the layout of the Hugging Face hub, renamed by `names`: views of the files
// (SafetensorsFile). `path` is a .safetensors file, a model.safetensors.index.json, whose parts lie in the same folder,
// or a folder with either. Throws CheckpointError, naming file, tensor and reason: also if two names become one, or a
// part lacks a tensor that the index assigns to it.
NamedTensors read_huggingface(const std::filesystem::path& path, const NameMap& names = {});

}  // namespace fulgur
