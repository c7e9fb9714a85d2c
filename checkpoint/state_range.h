#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace fulgur {

using StateTensors = std::map<std::string, at::Tensor, std::less<>>;

// The optimizer state of elements [begin, end) of a parameter, in the parameter's memory order. Each tensor is 1-dim
// and has end - begin elements.
struct StateRange {
  std::string parameter;  // the parameter's name in the module
  int64_t begin = 0, end = 0;
  // By torch's names; "master": OptimizerShard; "raw", "average": WeightAverage; "forward", "predicted":
  // SeparateGradients.
  StateTensors tensors{};
};

// Reads the state of elements [begin, end) of a parameter from a checkpoint, whichever ranks wrote it. The tensors are
// read-only. Throws CheckpointError if part of the state is missing.
using ReadRange = std::function<StateTensors(const std::string& parameter, int64_t begin, int64_t end)>;

}  // namespace fulgur
