#pragma once

#include <filesystem>

#include "fulgur/base/environment_variables.h"
#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// Where the facts about this host are read.
struct Host {
  std::filesystem::path proc = "/proc";
  std::filesystem::path cgroup = "/sys/fs/cgroup";
  std::filesystem::path folder = ".";  // where runs are written
  EnvironmentVariables variables = process_environment_variables();
};

// Processor, instruction sets, threads, memory, GPUs, libraries, limits of this process, and free disk. What a host
// does not tell (a container without /proc/meminfo) is said to be unknown.
Checks check_host(const Host& host);

}  // namespace fulgur::doctor
