#pragma once

#include <map>
#include <optional>
#include <string>

namespace fulgur {

// NAME -> value. Code that reads variables takes them as an argument, so that a test can make its own.
using EnvironmentVariables = std::map<std::string, std::string>;

EnvironmentVariables process_environment_variables();

// Unset and empty are the same.
std::optional<std::string> find_variable(const EnvironmentVariables& variables, const std::string& name);

}  // namespace fulgur
