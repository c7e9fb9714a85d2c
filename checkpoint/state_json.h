#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/formats/safetensors.h"

namespace fulgur {

// Converts a state to JSON (to_flat_json()). Its tensors are appended to `tensors` under their names for the caller to
// save; the text refers to them by name.
std::string state_to_json(const State& state, NamedTensors& tensors);

// `lookup` returns the tensor of a name to which the text refers. Throws CheckpointError, naming `file` and the reason.
State state_from_json(std::string_view text, std::string_view file,
                      const std::function<at::Tensor(const std::string& name)>& lookup);

}  // namespace fulgur
