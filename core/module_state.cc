#include "fulgur/core/module_state.h"

#include <torch/nn/module.h>

#include <unordered_set>

namespace fulgur {

std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> state;
  std::unordered_set<const at::TensorImpl*> seen;
  const auto add = [&](const auto& named_tensors) {
    for (const auto& entry : named_tensors) {
      if (seen.insert(entry.value().unsafeGetTensorImpl()).second) state.emplace_back(entry.key(), entry.value());
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return state;
}

}  // namespace fulgur
