#pragma once

#include <filesystem>

namespace fulgur {

// Makes and returns `root`/runs/version_N with the smallest N above all that exist. An empty root is the folder that the
// command was typed in (`bazel run` starts programs elsewhere and names that folder in BUILD_WORKING_DIRECTORY). Processes
// that ask at the same time get different folders. Throws std::filesystem::filesystem_error.
std::filesystem::path make_run_dir(const std::filesystem::path& root);

}  // namespace fulgur
