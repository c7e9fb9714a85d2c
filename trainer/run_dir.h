#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace fulgur {

// Makes and returns `root`/runs/version_N with the smallest N above all that exist. An empty root is
// working_directory(). Processes that call this at the same time get different folders. The folder survives a power
// cut. Throws CheckpointError or std::filesystem::filesystem_error.
std::filesystem::path make_run_dir(const std::filesystem::path& root);

// The folder of a named run, `root`/runs/<name>, which may exist or not; make_named_run_dir creates it. Throws
// UsageError if `name` cannot be the name of a folder.
std::filesystem::path named_run_dir(const std::filesystem::path& root, const std::string& name);
std::filesystem::path make_named_run_dir(const std::filesystem::path& root, const std::string& name);

// The folders of checkpoints of all runs in `root`/runs, first the one to which a checkpoint was written last.
std::vector<std::filesystem::path> checkpoint_folders_of_runs(const std::filesystem::path& root);

}  // namespace fulgur
