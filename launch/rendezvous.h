#pragma once

#include <functional>

#include "fulgur/distributed/world.h"
#include "fulgur/launch/cluster_environment.h"

namespace fulgur {

// Meets the other ranks at the environment's address and connects them; a single rank meets nobody. `while_meeting` is
// called repeatedly until every rank has joined, and may throw to end the wait. Throws DistributedError, which names
// the ranks that do not join and, if the master cannot be reached or its port is in use, what to change.
World connect_world(const ClusterEnvironment& environment, const WorldOptions& options,
                    const std::function<void()>& while_meeting);

// A second World of the ranks of `world`, for other transports, for example. All ranks must be on this host and make
// the same call. They meet at a free port of the loopback.
World connect_again(World& world, const WorldOptions& options);

}  // namespace fulgur
