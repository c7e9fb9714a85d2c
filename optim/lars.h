#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"

namespace fulgur::optim {

struct LARSOptions {
  double lr = 0.1;
  double momentum = 0.9;            // decay of the running sum of scaled gradients
  double weight_decay = 0.0;        // L2: added to the gradient
  double trust_coefficient = 1e-3;  // a step has about the norm lr * trust_coefficient * the tensor's norm
  double eps = 1e-8;                // added to the denominator of a gradient's scale
  void describe(FieldVisitor& visit);
};

// SGD for very large batches: each tensor's gradient g is scaled by trust_coefficient * |p| / (|g| + weight_decay *
// |p| + eps), or by 1 where a norm is 0, before it enters the momentum. LARS needs whole tensors, so it is not
// element-wise: strategies that shard parameters refuse it. Works on every device with torch's operations; norms are
// summed in fp64, state is fp32 for 16-bit parameters. Options are checked in the constructor: UsageError.
// Source: You et al. 2017, arXiv:1708.03888, algorithm 1.
class LARS final : public Optimizer {
 public:
  using Options = LARSOptions;
  explicit LARS(std::vector<at::Tensor> params, LARSOptions options = {});
  explicit LARS(std::vector<ParamGroup> groups, LARSOptions options = {});
  using Optimizer::step;
  void step(const GradientTransform& transform) override;
  std::optional<int64_t> num_state_values() const override { return 1; }
  ParameterState parameter_state(size_t group, size_t index) override;
  void load_parameter_state(size_t group, size_t index, const ParameterState& state) override;

 private:
  at::Tensor& momentum_buffer(size_t group, size_t index);
  at::Tensor scaled_gradient(const at::Tensor& param, const at::Tensor& grad, double weight_decay) const;

  LARSOptions options_;
  std::vector<std::vector<at::Tensor>> momentum_buffers_;  // [group][parameter]; undefined until the first gradient
};

}  // namespace fulgur::optim
