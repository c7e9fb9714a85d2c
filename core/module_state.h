#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "fulgur/core/module_fwd.h"

namespace fulgur {

// The parameters and buffers of a module, by the names that Python's state_dict gives them; a tied tensor once, under
// its first name.
std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& module);

}  // namespace fulgur
