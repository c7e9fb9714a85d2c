#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/describe.h"
#include "core/optimizer.h"

namespace fulgur::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};  // decay of the running means of the gradient and of its square
  double eps = 1e-8;                            // added to the root of the second mean
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

// Adam and AdamW differ in where the weight decay goes. Defaults and arithmetic are torch.optim's: one fused kernel of
// ATen (at::_fused_adam_, at::_fused_adamw_) per group and step. Each parameter counts its own updates, for the bias
// correction. Options are checked in the constructor: UsageError.
// Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
namespace internal {

class AdamBase : public Optimizer {
 public:
  using Optimizer::step;
  void step(const GradientTransform& transform) override;

 protected:
  enum class Decay { l2, decoupled };
  AdamBase(std::string_view name, std::vector<ParamGroup> groups, const AdamOptions& options, Decay decay);

 private:
  struct State {  // of one parameter; undefined until its first gradient
    at::Tensor exp_avg, exp_avg_sq, num_updates;
  };
  struct KernelArguments {  // parallel lists; kept from step to step for their capacity
    std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, num_updates;
    void clear();
  };

  void collect(size_t group_index);

  std::pair<double, double> betas_;
  double eps_;
  Decay decay_;
  std::vector<std::vector<State>> states_;  // [group][parameter]
  KernelArguments arguments_;
};

}  // namespace internal

class Adam final : public internal::AdamBase {
 public:
  explicit Adam(std::vector<at::Tensor> params, AdamOptions options = {});
  explicit Adam(std::vector<ParamGroup> groups, AdamOptions options = {});
};

class AdamW final : public internal::AdamBase {
 public:
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions options = {});
  explicit AdamW(std::vector<ParamGroup> groups, AdamWOptions options = {});
};

}  // namespace fulgur::optim
