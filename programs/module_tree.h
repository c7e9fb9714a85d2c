#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <string_view>

namespace fulgur::program {

// Gives a module submodules, parameters and buffers by Python's dotted names: in libtorch a name holds no dot, so that
// "layers.0.weight" is the parameter "weight" of the submodule "0" of "layers". Ownership: borrows the root.
class ModuleTree {
 public:
  explicit ModuleTree(torch::nn::Module& root) : root_(root) {}

  // The submodule at a path, which is made if it is missing; the root if the path is empty. Throws c10::Error
  // for a name that libtorch does not take.
  torch::nn::Module& at(std::string_view path);

  // Return the tensor that is registered. Throw c10::Error for a name that is taken or that libtorch does not take.
  at::Tensor add_parameter(const std::string& name, const at::Tensor& tensor, bool requires_grad);
  at::Tensor add_buffer(const std::string& name, const at::Tensor& tensor);

 private:
  torch::nn::Module& root_;
  std::map<std::string, torch::nn::Module*, std::less<>> modules_;  // by path
};

// Gives the floating-point parameters and buffers of the module another data type. Unlike torch::nn::Module::to(), and
// like Python, this leaves integers (counters, positions) as they are.
void set_floating_dtype(torch::nn::Module& module, torch::Dtype dtype, bool non_blocking);

}  // namespace fulgur::program
