#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace fulgur::doctor {

// What the record of a run says of its process and machine: the present folder, git commit, versions, host, process id,
// and, under the topic of each check, the line of what check_host() and check_network_settings() find. What is unknown
// is null. `run_folder` is where the run writes.
nlohmann::ordered_json describe_environment(const std::filesystem::path& run_folder);

// What a shell command prints, without the newline; empty if it fails.
std::string output_of(const char* command);

}  // namespace fulgur::doctor
