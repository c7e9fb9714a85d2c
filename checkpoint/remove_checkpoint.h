#pragma once

#include <filesystem>

namespace fulgur {

// Removes a checkpoint: the files that its manifest names and the manifest, then the folder. It is no checkpoint any
// more from the first moment on, so that one that is removed by halves is never taken for whole. Where the folder holds
// anything else, that stays, and the folder with it, with a warning. Throws CheckpointError if the folder has no
// readable manifest, so that nothing is removed that was not written by us, or if a file cannot be removed.
void remove_checkpoint(const std::filesystem::path& folder);

}  // namespace fulgur
