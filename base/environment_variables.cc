#include "fulgur/base/environment_variables.h"

#include <unistd.h>

#include <string_view>

namespace fulgur {

EnvironmentVariables process_environment_variables() {
  EnvironmentVariables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::optional<std::string> find_variable(const EnvironmentVariables& variables, const std::string& name) {
  const auto found = variables.find(name);
  if (found == variables.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

}  // namespace fulgur
