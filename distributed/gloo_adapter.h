#pragma once

#include "distributed/group.h"
#include "distributed/network.h"

namespace fulgur {

// Connects by Gloo, for tensors on the CPU, over the given network. Throws what c10d throws (std::exception).
Connect connect_gloo(Network network);

}  // namespace fulgur
