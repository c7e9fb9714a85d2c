#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/optim/element_wise_optimizer.h"

namespace fulgur::optim {

struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;        // decay of the running mean of the squared gradient
  double eps = 1e-8;          // added to the root of the mean
  double weight_decay = 0.0;  // L2: added to the gradient
  double momentum = 0.0;      // decay of the running sum of steps; 0: no sum is kept
  bool centered = false;      // divide by the deviation from the running mean of the gradient
  void describe(FieldVisitor& visit);
};

// Each element's gradient is divided by the root of its running mean square. Defaults and arithmetic are
// torch.optim.RMSprop's. Options are checked in the constructor: UsageError.
// Source: Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, arXiv:1308.0850.
class RMSprop final : public ElementWiseOptimizer {
 public:
  using Options = RMSpropOptions;
  explicit RMSprop(std::vector<at::Tensor> params, RMSpropOptions options = {});
  explicit RMSprop(std::vector<ParamGroup> groups, RMSpropOptions options = {});
  Rule rule(const Group& group, int64_t num_updates) const override;

 private:
  void update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                         const std::optional<at::Tensor>& gradient_divisor) override;

  RMSpropOptions options_;
};

}  // namespace fulgur::optim
