#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/optim/element_wise_optimizer.h"

namespace fulgur::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};  // decay of the running means of the gradient and of its square
  double eps = 1e-8;                            // added to the root of the second moment
  double weight_decay = 0.0;                    // L2: added to the gradient
  void describe(FieldVisitor& visit);
};

struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  // decoupled: the parameter shrinks by lr * weight_decay
  void describe(FieldVisitor& visit);
};

// Adam and AdamW differ in where the weight decay goes. Defaults and arithmetic are torch.optim's, with each
// parameter's own count of updates in the bias corrections. Options are checked in the constructor: UsageError. Source:
// Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
namespace internal {

class AdamBase : public ElementWiseOptimizer {
 public:
  Rule rule(const Group& group, int64_t num_updates) const override;

 protected:
  enum class Decay { l2, decoupled };
  AdamBase(std::string_view name, std::vector<ParamGroup> groups, const AdamOptions& options, Decay decay);
  void update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                         const std::optional<at::Tensor>& gradient_divisor) override;

 private:
  std::pair<double, double> betas_;
  double eps_;
  Decay decay_;
};

}  // namespace internal

class Adam final : public internal::AdamBase {
 public:
  using Options = AdamOptions;
  explicit Adam(std::vector<at::Tensor> params, AdamOptions options = {});
  explicit Adam(std::vector<ParamGroup> groups, AdamOptions options = {});
};

// Adam with decoupled weight decay.
class AdamW final : public internal::AdamBase {
 public:
  using Options = AdamWOptions;
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions options = {});
  explicit AdamW(std::vector<ParamGroup> groups, AdamWOptions options = {});
};

}  // namespace fulgur::optim
