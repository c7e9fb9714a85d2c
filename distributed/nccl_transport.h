#pragma once

#include <c10/util/intrusive_ptr.h>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "fulgur/distributed/group.h"

namespace fulgur {

// Connects the ranks of a group by NCCL; null if the group's device is not a CUDA device. NCCL uses the interface of
// the group's network if it was chosen by name and NCCL_SOCKET_IFNAME is not set; otherwise NCCL chooses one. Throws
// UsageError if fulgur was built without CUDA, and what c10d throws (std::exception).
c10::intrusive_ptr<c10d::Backend> connect_nccl(const GroupConfig& group);

// "2.28.9", the version of the NCCL that is linked; empty if fulgur was built without CUDA. Needs no GPU.
std::string nccl_version();

}  // namespace fulgur
