#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "fulgur/core/module_fwd.h"
#include "fulgur/distributed/world.h"
#include "fulgur/strategies/engine/flat_parameters.h"

namespace fulgur {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Gives parameters and buffers on every rank the values of rank 0. Throws SetupError on every rank, with the first
// difference, if names, shapes or dtypes differ.
void make_equal(const torch::nn::Module& module, World& world);

// Throws SetupError on every rank if the ranks do not train the same parameters, by name, shape and dtype, in the same
// groups. `added` are the parameters and buffers that were registered in the middle of a run: they must be the same,
// too.
void check_same_buckets(const FlatParameters& parameters, const NamedTensors& added, Collective& control);

}  // namespace fulgur
