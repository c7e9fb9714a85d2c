#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "fulgur/distributed/group.h"

namespace fulgur {

// Connects the ranks of a group by Gloo, for CPU tensors, over the group's network. The backend's timeout is the
// group's connect_timeout until setTimeout() is called. Throws what c10d throws (std::exception).
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const GroupConfig& group);

}  // namespace fulgur
