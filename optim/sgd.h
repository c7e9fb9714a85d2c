#pragma once

#include <optional>
#include <vector>

#include "core/describe.h"
#include "core/optimizer.h"

namespace fulgur::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;      // of the running sum of gradients; 0: none is kept
  double dampening = 0.0;     // a gradient enters the sum times 1 - dampening
  double weight_decay = 0.0;  // L2: added to the gradient
  bool nesterov = false;      // needs momentum and no dampening
  void describe(FieldVisitor& visit);
};

// Stochastic gradient descent with torch.optim.SGD's defaults and arithmetic: one fused kernel of ATen
// (at::_fused_sgd_) per group and step. Options are checked in the constructor: UsageError.
// Source: Sutskever et al. 2013 for momentum, as in torch.optim.SGD.
class SGD final : public Optimizer {
 public:
  explicit SGD(std::vector<at::Tensor> params, SGDOptions options = {});
  explicit SGD(std::vector<ParamGroup> groups, SGDOptions options = {});
  using Optimizer::step;
  void step(const GradientTransform& transform) override;

 private:
  struct KernelArguments {
    std::vector<at::Tensor> params, grads, momentum_buffers;
  };
  void update(const Group& group, KernelArguments& arguments, const std::optional<at::Tensor>& divisor,
              bool is_first_step);

  SGDOptions options_;
  std::vector<std::vector<at::Tensor>> momentum_buffers_;  // [group][parameter]; undefined until the first gradient
};

}  // namespace fulgur::optim
