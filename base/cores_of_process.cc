#include "fulgur/base/cores_of_process.h"

#include <sched.h>

#include <cstddef>

namespace fulgur {

std::vector<int> cores_of_process() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return {0};
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<size_t>(core), &set)) cores.push_back(core);
  }
  return cores;
}

}  // namespace fulgur
