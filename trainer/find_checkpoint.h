#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fulgur {

// The checkpoint that `ckpt_path` means: a folder, or "last" or "best" of the first of `folders` that has one. Nothing:
// the run begins anew, as it does for "" and, unless `is_needed`, for a "last" that nobody has written yet. Throws
// UsageError if there is no such checkpoint.
std::optional<std::filesystem::path> find_checkpoint(const std::string& ckpt_path,
                                                     const std::vector<std::filesystem::path>& folders, bool is_needed);

}  // namespace fulgur
