#include "optim/torch_optimizer.h"

#include <ATen/ops/empty.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstring>
#include <unordered_set>
#include <vector>

#include "core/error.h"
#include "optim/gradient_divisor.h"

namespace fulgur::optim {
namespace {

// Also leaves out the second mention of a tied parameter, which torch would update twice.
std::vector<ParamGroup> groups_of(torch::optim::Optimizer& optimizer) {
  std::vector<ParamGroup> groups;
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    std::unordered_set<const c10::TensorImpl*> seen;
    std::erase_if(group.params(),
                  [&](const at::Tensor& param) { return !seen.insert(param.unsafeGetTensorImpl()).second; });
    groups.push_back({.params = group.params(), .lr = group.options().get_lr()});
  }
  return groups;
}

}  // namespace

TorchOptimizer::TorchOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer)
    : Optimizer("TorchOptimizer", groups_of(*optimizer), /*lr=*/0.0, /*weight_decay=*/0.0),
      optimizer_(std::move(optimizer)),
      needs_closure_(dynamic_cast<torch::optim::LBFGS*>(optimizer_.get()) != nullptr) {}

void TorchOptimizer::add_param_group(ParamGroup) {
  throw UsageError(
      "TorchOptimizer cannot be given a further group; make it with all groups, those to be trained later too");
}

void TorchOptimizer::step(const GradientTransform& transform) {
  transform_gradients(transform, params());
  set_learning_rates();
  optimizer_->step();
}

void TorchOptimizer::step(const Closure& closure) {
  set_learning_rates();
  optimizer_->step(closure);
}

State TorchOptimizer::state() const {
  torch::serialize::OutputArchive archive;
  optimizer_->save(archive);
  std::vector<char> bytes;
  archive.save_to([&](const void* data, size_t size) {
    const char* begin = static_cast<const char*>(data);
    bytes.insert(bytes.end(), begin, begin + size);
    return size;
  });
  const at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  State state;
  state.set("torch", tensor);
  return state;
}

void TorchOptimizer::load_state(const State& state) {
  const at::Tensor bytes = state.get<at::Tensor>("torch").contiguous();
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  optimizer_->load(archive);
}

void TorchOptimizer::set_learning_rates() {
  auto& torch_groups = optimizer_->param_groups();
  for (size_t i = 0; i < groups().size(); ++i) torch_groups[i].options().set_lr(groups()[i].lr);
}

}  // namespace fulgur::optim
