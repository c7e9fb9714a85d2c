#pragma once

#include <string>
#include <vector>

#include "fulgur/base/environment_variables.h"
#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// Whether ranks could meet as the environment says: `interfaces` of this host and the choice among them
// (FULGUR_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), the variables of torchrun, SLURM or Open MPI, and whether MASTER_ADDR is
// known and somebody listens there. Waits for the master at most 5 s.
Checks check_network(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables);

}  // namespace fulgur::doctor
