#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "fulgur/optim/update_rules.h"

namespace fulgur::optim {

// `param` after the expected update of `next` (update_rules.h), on any device; `last` is the rule of the last update,
// and `states` are as that has left them, undefined for those that the rule does without.
at::Tensor after_expected_update(const Rule& last, const Rule& next, const at::Tensor& param,
                                 const std::array<at::Tensor, kMaxStates>& states);

}  // namespace fulgur::optim
