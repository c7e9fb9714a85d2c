#pragma once

#include <filesystem>
#include <string_view>

namespace fulgur {

// Files of several runs in one folder: env.json, env-v1.json, env-v2.json, ...

// The last of them that exists; empty if there is none.
std::filesystem::path last_numbered(const std::filesystem::path& folder, std::string_view stem,
                                    std::string_view extension);

// The first of them that does not exist.
std::filesystem::path next_numbered(const std::filesystem::path& folder, std::string_view stem,
                                    std::string_view extension);

}  // namespace fulgur
