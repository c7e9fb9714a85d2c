#pragma once

#include "fulgur/distributed/group.h"
#include "fulgur/distributed/network.h"

namespace fulgur {

// Connects by Gloo, for CPU tensors, over the given network. The backend's timeout is the group's connect_timeout until
// setTimeout() is called. Throws what c10d throws (std::exception).
Connect connect_gloo(Network network);

}  // namespace fulgur
