#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/state_range.h"
#include "core/optimizer.h"
#include "core/state.h"

// How optimizers stand in a checkpoint. The state that all ranks share has
//   optimizers/<i>/...          name, the settings of groups, and what else the optimizer keeps
//   num_updates/<parameter>     of those that had any
//   strides/<parameter>         of those that do not lie row by row in memory
// and ranges have what is kept for each element.
namespace fulgur {

// A parameter that an optimizer has.
struct Trained {
  std::string name;  // in the module
  at::Tensor param;
  Optimizer* optimizer;
  size_t group, index;
};
std::vector<Trained> trained_params(const torch::nn::Module& module, const Optimizers& optimizers);

void save_optimizers(const torch::nn::Module& module, const Optimizers& optimizers, State& shared);

// Throws CheckpointError if they are others, or a parameter lies in memory in another order.
void load_optimizers(const torch::nn::Module& module, const Optimizers& optimizers, const State& shared);

void save_num_updates(State& shared, const Trained& trained, int64_t num_updates);
int64_t saved_num_updates(const State& shared, const std::string& parameter);

// Elements of each tensor of a whole parameter's state, in the order of their memory.
StateTensors part_of(const ParameterState& whole, int64_t begin, int64_t num_elements);

// The state of a whole parameter, with tensors of its shape; for reading only.
ParameterState read_whole(const Trained& trained, const State& shared, const ReadRange& read);

// `param`, or the part of it that `saved` is of, as the late update of the checkpoint leaves it.
at::Tensor updated_parameter(const ParameterState& saved, const at::Tensor& param);

}  // namespace fulgur
