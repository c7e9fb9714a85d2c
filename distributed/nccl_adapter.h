#pragma once

#include "distributed/group.h"

namespace fulgur {

// Connects by NCCL, for tensors on the group's CUDA device. Throws UsageError if fulgur was built without CUDA, and
// what c10d throws (std::exception).
Connect connect_nccl();

}  // namespace fulgur
