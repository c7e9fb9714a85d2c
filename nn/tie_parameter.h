#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>

namespace fulgur {

// Makes a registered parameter of `module` the same tensor as `weight`, as a language model's output head and its
// token embedding are:
//   tie_parameter(*head, "weight", head->weight, embedding->weight);
// Python's `head.weight = embedding.weight` is not enough in C++: it changes the member, and the registered parameter
// remains, without a gradient. `member` is the module's own handle to the parameter called `name`.
// Afterwards there is one tensor: optimizers, totals and checkpoints count it once, under the name that comes first.
// Throws c10::ValueError if the module itself (not a child) has no such parameter, `member` is another tensor, or the
// shapes, dtypes or devices differ; nothing is changed then.
void tie_parameter(torch::nn::Module& module, const std::string& name, at::Tensor& member, const at::Tensor& weight);

}  // namespace fulgur
