#pragma once

#include <vector>

namespace fulgur {

// The numbers of the cores that this process may run on (taskset, cgroups), in ascending order; {0} if the system does
// not tell.
std::vector<int> cores_of_process();

}  // namespace fulgur
