#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/formats/safetensors.h"

namespace fulgur {

// CheckpointReader::finished_weights() with every name of tied weights, as load_state_dict() of Python expects.
NamedTensors weights_by_every_name(const CheckpointReader& checkpoint);

// The weights of a program in the checkpoint of a module that trained it, by the program's own names. The checkpoint
// has them below the name under which the module has registered the program ("net.layers.0.weight"), or without a
// prefix. `sizes`: the sizes of each weight, by name. `program`: the program's file, for messages.
// Throws UsageError if the checkpoint does not have all of them below one name, has them below several names, or has
// weights below that name which the program does not have.
std::map<std::string, at::Tensor> weights_of_program(const CheckpointReader& checkpoint,
                                                     const std::map<std::string, std::vector<int64_t>>& sizes,
                                                     std::string_view program);

}  // namespace fulgur
