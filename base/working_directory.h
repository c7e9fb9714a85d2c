#pragma once

#include <filesystem>

namespace fulgur {

// The folder that the command was typed in. `bazel run` starts programs in another folder and passes this one in
// BUILD_WORKING_DIRECTORY.
std::filesystem::path working_directory();

// The path relative to the present folder if it is in there, otherwise as it is; for messages.
std::filesystem::path short_path(const std::filesystem::path& path);

}  // namespace fulgur
