#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/environment_variables.h"
#include "fulgur/doctor/check.h"

namespace fulgur::doctor {

// Whether ranks could find each other as the environment says: `interfaces` of this host with the choice among them
// (FULGUR_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and the variables of torchrun, SLURM or Open MPI. Waits for nothing.
Checks check_network_settings(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables);

// Whether there is a way to the host and port at which the ranks meet: those of the launcher, or otherwise MASTER_ADDR
// and MASTER_PORT. Returns nullopt if there is no such place. A port at which nobody listens is a problem only if the
// launcher should listen there (torchrun's agent): rank 0 of a run listens only when training starts. Waits at most 5
// s.
std::optional<Check> check_master(const EnvironmentVariables& variables);

}  // namespace fulgur::doctor
