#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace fulgur::doctor {

// What the record of a run says of its process and machine: the present folder, git commit, versions, host, process id,
// and what check_host() finds. `run_folder`: where the run writes. What is unknown is null.
nlohmann::ordered_json describe_environment(const std::filesystem::path& run_folder);

// What a shell command prints, without the newline; empty if it fails.
std::string output_of(const char* command);

}  // namespace fulgur::doctor
