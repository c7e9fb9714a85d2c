#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace fulgur {

// Writes native code to a folder from which it can be loaded, and returns that folder. It is named by a hash of the
// content, in $XDG_CACHE_HOME/fulgur/compiled (~/.cache/fulgur/compiled by default; without a home,
// fulgur-compiled-<user> in the folder for temporary files). All processes share it. Nothing removes it: delete it
// while no program loads it. `files` has bytes by file name; `archive` is for messages. Throws CheckpointError
// if a name is no plain file name, if another user could change or exchange the folder, or if the code cannot be
// written.
std::filesystem::path unpack_code(const std::map<std::string, std::string_view>& files, std::string_view archive);

}  // namespace fulgur
