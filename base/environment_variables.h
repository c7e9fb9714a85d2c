#pragma once

#include <map>
#include <optional>
#include <string>

namespace fulgur {

// NAME -> value. Code that reads variables takes them as an argument, so that tests can supply their own.
using EnvironmentVariables = std::map<std::string, std::string>;

EnvironmentVariables process_environment_variables();

// Returns nullopt if the variable is unset or empty.
std::optional<std::string> find_variable(const EnvironmentVariables& variables, const std::string& name);

}  // namespace fulgur
