#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fulgur {

// The checkpoint that `ckpt_path` means: a folder, or "last" or "best" of the first of `folders` that has one.
// nullopt: the run starts from scratch, as for "" and, unless `is_needed`, for a "last" that is not written yet.
// Throws UsageError if there is no such checkpoint.
std::optional<std::filesystem::path> find_checkpoint(const std::string& ckpt_path,
                                                     const std::vector<std::filesystem::path>& folders, bool is_needed);

}  // namespace fulgur
