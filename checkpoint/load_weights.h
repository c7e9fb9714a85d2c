#pragma once

#include <torch/nn/module.h>

#include <string_view>

#include "checkpoint/safetensors.h"

namespace fulgur {

// Copies weights, wherever they were read from, into the parameters and buffers of a module, which may be of another
// precision and on any device:
//   load_weights(*model, read_huggingface("gpt2/", names), "gpt2/");
// With `strict` both must have the same names (of tied ones one name is enough): else CheckpointError that lists what
// is missing and what is unexpected; otherwise that is logged. A shape that differs is an error in either case, before
// anything is copied. `source` begins the messages.
void load_weights(torch::nn::Module& module, const NamedTensors& weights, std::string_view source, bool strict = true);

}  // namespace fulgur
