#pragma once

#include "fulgur/distributed/group.h"
#include "fulgur/distributed/network.h"

namespace fulgur {

// Connects by NCCL, for tensors on the group's CUDA device. NCCL uses the network's interface if it was chosen by name
// and NCCL_SOCKET_IFNAME is not set; otherwise NCCL chooses one. Throws UsageError if fulgur was built without CUDA,
// and what c10d throws (std::exception).
Connect connect_nccl(const Network& network);

}  // namespace fulgur
