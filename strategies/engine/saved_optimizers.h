#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/state_range.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"

// How optimizers are saved in a checkpoint. The state that all ranks share has
//   optimizers/<i>/...          name, settings of groups, and the optimizer's own state
//   num_updates/<parameter>     only for parameters with updates
//   strides/<parameter>         only for parameters that are not row-major
// and the ranges hold the state of each element.
namespace fulgur {

// A parameter that an optimizer trains.
struct Trained {
  std::string name;  // the parameter's name in the module
  at::Tensor param;
  Optimizer* optimizer;
  size_t group, index;
};
std::vector<Trained> trained_params(const torch::nn::Module& module, const Optimizers& optimizers);

void save_optimizers(const torch::nn::Module& module, const Optimizers& optimizers, State& shared);

// Throws CheckpointError if the saved optimizers are different, or a parameter was saved with other strides.
void load_optimizers(const torch::nn::Module& module, const Optimizers& optimizers, const State& shared);

void save_num_updates(State& shared, const Trained& trained, int64_t num_updates);
int64_t saved_num_updates(const State& shared, const std::string& parameter);

// Elements of each tensor of a whole parameter's state, in the order of their memory.
StateTensors part_of(const ParameterState& whole, int64_t begin, int64_t num_elements);

// The state of a whole parameter, with tensors of its shape; for reading only.
ParameterState read_whole(const Trained& trained, const State& shared, const ReadRange& read);

}  // namespace fulgur
