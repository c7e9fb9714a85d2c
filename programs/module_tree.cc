#include "fulgur/programs/module_tree.h"

#include <memory>
#include <utility>
#include <vector>

namespace fulgur::program {
namespace {

// "layers.0.weight" -> {"layers.0", "weight"}
std::pair<std::string, std::string> split(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == name.npos) return {"", std::string(name)};
  return {std::string(name.substr(0, dot)), std::string(name.substr(dot + 1))};
}

}  // namespace

torch::nn::Module& ModuleTree::at(std::string_view path) {
  if (path.empty()) return root_;
  const auto found = modules_.find(path);
  if (found != modules_.end()) return *found->second;
  const auto [parent, name] = split(path);
  const auto child = at(parent).register_module(name, std::make_shared<torch::nn::Module>(name));
  modules_.emplace(path, child.get());
  return *child;
}

at::Tensor ModuleTree::add_parameter(const std::string& name, const at::Tensor& tensor, bool requires_grad) {
  const auto [path, own] = split(name);
  return at(path).register_parameter(own, tensor, requires_grad);
}

at::Tensor ModuleTree::add_buffer(const std::string& name, const at::Tensor& tensor) {
  const auto [path, own] = split(name);
  return at(path).register_buffer(own, tensor);
}

void set_floating_dtype(torch::nn::Module& module, torch::Dtype dtype, bool non_blocking) {
  for (const std::vector<at::Tensor>& tensors : {module.parameters(), module.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_floating_point()) tensor.set_data(tensor.to(dtype, non_blocking));
    }
  }
}

}  // namespace fulgur::program
