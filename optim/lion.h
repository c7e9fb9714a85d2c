#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/optim/element_wise_optimizer.h"

namespace fulgur::optim {

struct LionOptions {
  double lr = 1e-4;                            // every element moves by lr; 3 to 10 times smaller than AdamW's
  std::pair<double, double> betas{0.9, 0.99};  // decay of the mean whose sign is the step, and of the kept mean
  double weight_decay = 0.0;                   // decoupled: the parameter shrinks by lr * weight_decay
  void describe(FieldVisitor& visit);
};

// The step is the sign of a mean of the gradient: half of AdamW's state. torch.optim has no such optimizer; defaults
// and arithmetic are the paper's. Options are checked in the constructor: UsageError. Source: Chen et al. 2023,
// arXiv:2302.06675, program 1.
class Lion final : public ElementWiseOptimizer {
 public:
  using Options = LionOptions;
  explicit Lion(std::vector<at::Tensor> params, LionOptions options = {});
  explicit Lion(std::vector<ParamGroup> groups, LionOptions options = {});
  Rule rule(const Group& group, int64_t num_updates) const override;

 private:
  void update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                         const std::optional<at::Tensor>& gradient_divisor) override;

  LionOptions options_;
};

}  // namespace fulgur::optim
