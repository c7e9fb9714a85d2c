#pragma once

#include <filesystem>

namespace fulgur {

// Makes and returns `root`/runs/version_N with the smallest N above all that exist. An empty root is
// working_directory(). Processes that ask at the same time get different folders. Throws
// std::filesystem::filesystem_error.
std::filesystem::path make_run_dir(const std::filesystem::path& root);

}  // namespace fulgur
