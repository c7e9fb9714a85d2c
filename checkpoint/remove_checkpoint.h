#pragma once

#include <filesystem>

namespace fulgur {

// Removes a checkpoint: the manifest, the files that it names, then the folder. The folder stops being a checkpoint in
// the first step, so that a half-removed checkpoint is never taken for complete. If the folder holds anything else,
// those entries and the folder stay, with a warning. Throws CheckpointError if the folder has no readable manifest, so
// that only checkpoints are ever removed, or if a file cannot be removed.
void remove_checkpoint(const std::filesystem::path& folder);

}  // namespace fulgur
