#pragma once

#include <sys/resource.h>

#include <filesystem>

#include "fulgur/base/environment_variables.h"
#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// A limit of this process, see setrlimit(2).
rlimit limit_of(decltype(RLIMIT_NOFILE) resource);

// Where the facts about this host are read.
struct Host {
  std::filesystem::path proc = "/proc";
  std::filesystem::path cgroup = "/sys/fs/cgroup";
  std::filesystem::path infiniband = "/sys/class/infiniband";
  std::filesystem::path folder = ".";  // where runs are written; need not exist yet
  rlimit open_files = limit_of(RLIMIT_NOFILE);
  rlimit locked_memory = limit_of(RLIMIT_MEMLOCK);
  EnvironmentVariables variables = process_environment_variables();
};

// Processor, instruction sets, threads, memory, GPUs, libraries, limits of this process, and free disk. Limits of
// memory and processor time are the tightest of this process's control group and the groups around it, of version 1 or
// 2. What a host does not tell (a container without /proc/meminfo) is said to be unknown.
Checks check_host(const Host& host);

}  // namespace fulgur::doctor
