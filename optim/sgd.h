#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/optim/element_wise_optimizer.h"

namespace fulgur::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;      // decay of the running sum of gradients; 0: no sum is kept
  double dampening = 0.0;     // a gradient enters the sum times 1 - dampening
  double weight_decay = 0.0;  // L2: added to the gradient
  bool nesterov = false;      // needs momentum and no dampening
  void describe(FieldVisitor& visit);
};

// Stochastic gradient descent with torch.optim.SGD's defaults and arithmetic. Options are checked in the constructor:
// UsageError. Source: Sutskever et al. 2013 for momentum, as in torch.optim.SGD.
class SGD final : public ElementWiseOptimizer {
 public:
  using Options = SGDOptions;
  explicit SGD(std::vector<at::Tensor> params, SGDOptions options = {});
  explicit SGD(std::vector<ParamGroup> groups, SGDOptions options = {});
  Rule rule(const Group& group, int64_t num_updates) const override;

 private:
  void update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                         const std::optional<at::Tensor>& gradient_divisor) override;

  SGDOptions options_;
};

}  // namespace fulgur::optim
