#include "fulgur/core/ready_gradients.h"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace fulgur {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

class ReadyGradients final : public Node {
 public:
  explicit ReadyGradients(std::vector<at::Tensor> gradients) : gradients_(std::move(gradients)) {}

  variable_list apply(variable_list&& of_outputs) override {
    const at::Tensor& scale = of_outputs.front();
    if (!scale.defined()) return variable_list(gradients_.size());
    std::vector<at::Tensor> gradients = take();
    const bool is_one = scale.is_cpu() && scale.item<double>() == 1;
    if (!is_one) at::_foreach_mul_(gradients, scale.reshape({}));
    return gradients;
  }
  void release_variables() override { gradients_.clear(); }
  std::string name() const override { return std::string(kReadyGradients); }

  // Does what the engine would do. If this node or a parameter has a hook, changes nothing and returns false.
  bool finish_without_engine() {
    const auto is_hooked = [](const Edge& edge) { return edge.is_valid() && !is_plain(*edge.function); };
    if (!pre_hooks().empty() || !tensor_pre_hooks().empty() || !post_hooks().empty()) return false;
    if (!retains_grad_hooks().empty()) return false;
    if (std::ranges::any_of(next_edges(), is_hooked)) return false;
    const c10::AutoGradMode no_gradient(false);
    std::vector<at::Tensor> gradients = take();
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!next_edge(i).is_valid()) continue;
      at::Tensor& sum = static_cast<AccumulateGrad&>(*next_edge(i).function).variable.mutable_grad();
      sum.defined() ? void(sum.add_(gradients[i])) : void(sum = std::move(gradients[i]));
    }
    return true;
  }

 private:
  std::vector<at::Tensor> take() {
    TORCH_CHECK(!gradients_.empty(),
                "backward of a loss that came with its gradients runs once; leave cuda_graph out, or set "
                "ProgramOptions::compiled to false for a compiled step, to run it again");
    TORCH_CHECK(
        !c10::GradMode::is_enabled(),
        "a loss that came with its gradients has no second derivatives (create_graph); leave cuda_graph out, or "
        "set ProgramOptions::compiled to false for a compiled step");
    return std::exchange(gradients_, {});
  }

  static bool is_plain(Node& node) {
    const auto* accumulate = dynamic_cast<AccumulateGrad*>(&node);
    return accumulate != nullptr && node.pre_hooks().empty() && node.tensor_pre_hooks().empty() &&
           node.post_hooks().empty() && accumulate->tensor_post_acc_grad_hooks() == nullptr;
  }

  std::vector<at::Tensor> gradients_;  // one for each edge
};

}  // namespace

void set_ready_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                         std::vector<at::Tensor> gradients) {
  TORCH_CHECK(loss.numel() == 1, "the loss has sizes ", loss.sizes());
  TORCH_CHECK(gradients.size() == parameters.size() && !gradients.empty(), parameters.size(), " parameters have ",
              gradients.size(), " gradients");
  const std::shared_ptr<Node> node(new ReadyGradients(std::move(gradients)), torch::autograd::deleteNode);
  torch::autograd::edge_list edges;
  edges.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) edges.push_back(torch::autograd::impl::gradient_edge(parameter));
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(loss, node);
}

at::Tensor fit_for_parameter(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (gradient.sizes() == parameter.sizes() && gradient.strides() == parameter.strides() && gradient.use_count() == 1 &&
      gradient.storage().use_count() == 1 && gradient.storage().nbytes() == gradient.nbytes()) {
    return gradient;
  }
  return at::empty_like(parameter.detach()).copy_(gradient);
}

void run_backward(const at::Tensor& loss) {
  auto* ready = dynamic_cast<ReadyGradients*>(loss.grad_fn().get());
  if (torch::autograd::AnomalyMode::is_enabled()) ready = nullptr;  // the engine looks for gradients that are NaN
  if (ready == nullptr || !ready->finish_without_engine()) loss.backward();
}

}  // namespace fulgur
