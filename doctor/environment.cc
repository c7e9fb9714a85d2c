#include "fulgur/doctor/environment.h"

#include <torch/version.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "fulgur/base/environment_variables.h"
#include "fulgur/base/host_name.h"
#include "fulgur/base/version.h"
#include "fulgur/distributed/network.h"
#include "fulgur/doctor/check.h"
#include "fulgur/doctor/host_checks.h"
#include "fulgur/doctor/network_checks.h"

namespace fulgur::doctor {

std::string output_of(const char* command) {
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return "";
  std::string text;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
  if (pclose(pipe) != 0) return "";
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

nlohmann::ordered_json describe_environment(const std::filesystem::path& run_folder) {
  const std::string commit = output_of("git rev-parse HEAD 2>/dev/null");
  std::error_code error;
  nlohmann::ordered_json environment{{"folder", std::filesystem::current_path(error).string()},
                                     {"git_commit", commit.empty() ? nlohmann::json() : nlohmann::json(commit)},
                                     {"fulgur", version()},
                                     {"libtorch", TORCH_VERSION},
                                     {"compiler", __VERSION__},
                                     {"host", host_name()},
                                     {"process", getpid()}};
  for (const Checks& checks : {check_host({.folder = run_folder}),
                               check_network_settings(interface_names(), process_environment_variables())}) {
    for (const Check& check : checks) environment[check.topic] = to_line(check);
  }
  return environment;
}

}  // namespace fulgur::doctor
