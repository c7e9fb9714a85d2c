#pragma once

#include <filesystem>

#include "checkpoint/safetensors.h"

namespace fulgur {

// Writes a checkpoint: the folder appears whole or not at all, with the weights in model.safetensors, by parameter
// name. Throws CheckpointError; an existing folder is left alone.
void write_checkpoint(const std::filesystem::path& folder, const NamedTensors& module_state);

}  // namespace fulgur
