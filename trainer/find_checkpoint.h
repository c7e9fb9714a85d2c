#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fulgur {

// Finds the checkpoint that `ckpt_path` names: a folder, or "last" or "best", which is taken from the first of
// `folders` that has one. Returns nullopt, so that the run starts from scratch, for "" and, unless `is_needed`, if no
// folder has a "last" yet. Throws UsageError if there is no such checkpoint.
std::optional<std::filesystem::path> find_checkpoint(const std::string& ckpt_path,
                                                     const std::vector<std::filesystem::path>& folders, bool is_needed);

}  // namespace fulgur
