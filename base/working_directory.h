#pragma once

#include <filesystem>

namespace fulgur {

// The folder that the command was typed in. `bazel run` starts programs in another folder and passes this one in
// BUILD_WORKING_DIRECTORY.
std::filesystem::path working_directory();

}  // namespace fulgur
