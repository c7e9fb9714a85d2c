#pragma once

#include <filesystem>

namespace fulgur {

// Throws UsageError unless the path is a checkpoint, or cannot be looked at, because reading it says why. The message
// says what was probably meant: the checkpoint of a run's folder, the folder of a checkpoint's file, the nearest name.
void require_checkpoint(std::filesystem::path path);

}  // namespace fulgur
