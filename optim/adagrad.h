#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/optim/element_wise_optimizer.h"

namespace fulgur::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0.0;                   // the t-th update of a parameter has lr / (1 + (t - 1) * lr_decay)
  double weight_decay = 0.0;               // L2: added to the gradient
  double initial_accumulator_value = 0.0;  // start of the sum of squared gradients
  double eps = 1e-10;                      // added to the root of the sum
  void describe(FieldVisitor& visit);
};

// Each element's steps shrink with the sum of its squared gradients. Defaults and arithmetic are torch.optim.Adagrad's.
// Options are checked in the constructor: UsageError.
// Source: Duchi et al. 2011, JMLR 12.
class Adagrad final : public ElementWiseOptimizer {
 public:
  using Options = AdagradOptions;
  explicit Adagrad(std::vector<at::Tensor> params, AdagradOptions options = {});
  explicit Adagrad(std::vector<ParamGroup> groups, AdagradOptions options = {});
  Rule rule(const Group& group, int64_t num_updates) const override;

 private:
  void update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                         const std::optional<at::Tensor>& gradient_divisor) override;

  AdagradOptions options_;
};

}  // namespace fulgur::optim
