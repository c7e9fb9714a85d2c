#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace fulgur {

using StateTensors = std::map<std::string, at::Tensor, std::less<>>;

// The optimizer's state of some elements of a parameter, in the order of the parameter's memory. Each tensor is 1-dim
// and has as many elements.
struct StateRange {
  std::string parameter;  // its name in the module
  int64_t begin = 0, end = 0;
  StateTensors tensors{};  // by torch's names, "master", and "next": see FlatStrategy::state
};

// Reads the state of elements [begin, end) of a parameter out of a checkpoint, from whichever ranks wrote it. The
// tensors are for reading only. Throws CheckpointError if something of it is missing.
using ReadRange = std::function<StateTensors(const std::string& parameter, int64_t begin, int64_t end)>;

}  // namespace fulgur
