#pragma once

#include <torch/nn/module.h>

#include "distributed/world.h"
#include "strategies/flat_parameters.h"

namespace fulgur {

// Gives parameters and buffers on every rank the values of rank 0. Throws SetupError on every rank, with the first
// difference, if they are not of the same names, shapes and dtypes.
void make_equal(const torch::nn::Module& module, World& world);

// Throws SetupError on every rank if the ranks do not train the same parameters in the same groups.
void check_same_buckets(const FlatParameters& parameters, Collective& control);

}  // namespace fulgur
