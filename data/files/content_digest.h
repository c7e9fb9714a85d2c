#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace fulgur {

// A digest of 16 hex digits for Dataset::digest().
std::string hex_digest(std::string_view text);

// A line that tells a file from others without reading all of it: its name without the folder, its size, and a hash of
// its first and last 64 KiB.
std::string describe_content(const std::filesystem::path& path, std::span<const char> bytes);

}  // namespace fulgur
