#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>

#include "checkpoint/safetensors.h"
#include "core/state.h"

namespace fulgur {

// JSON as to_flat_json() writes it. Tensors are appended to `tensors` under the names of their values, for the caller
// to save; the text refers to them.
std::string state_to_json(const State& state, NamedTensors& tensors);

// `lookup` gives the tensor of a name that the text refers to. Throws CheckpointError, naming `file` and the reason.
State state_from_json(std::string_view text, std::string_view file,
                      const std::function<at::Tensor(const std::string& name)>& lookup);

}  // namespace fulgur
