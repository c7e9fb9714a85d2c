#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/optimizer.h"

namespace fulgur::optim {

struct LAMBOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};  // decay of the running means of the gradient and of its square
  double eps = 1e-6;                            // added to the root of the second moment
  double weight_decay = 0.0;                    // added to Adam's direction, times the parameter
  void describe(FieldVisitor& visit);
};

// Adam for very large batches: each tensor moves by lr times its own norm, or by lr times Adam's direction where a
// norm is 0. LAMB needs whole tensors, so it is not element-wise: strategies that shard parameters refuse it. Works
// on every device with torch's operations; norms are summed in fp64, state is fp32 for 16-bit parameters. Put biases
// and normalization weights in a group without weight decay, as with AdamW. Options are checked in the constructor:
// UsageError.
// Source: You et al. 2020, arXiv:1904.00962, algorithm 2 with bias correction.
class LAMB final : public Optimizer {
 public:
  using Options = LAMBOptions;
  explicit LAMB(std::vector<at::Tensor> params, LAMBOptions options = {});
  explicit LAMB(std::vector<ParamGroup> groups, LAMBOptions options = {});
  using Optimizer::step;
  void step(const GradientTransform& transform) override;
  std::optional<int64_t> num_state_values() const override { return 2; }
  ParameterState parameter_state(size_t group, size_t index) override;
  void load_parameter_state(size_t group, size_t index, const ParameterState& state) override;

 private:
  struct State {  // state of one parameter; tensors are undefined until its first gradient
    at::Tensor exp_avg, exp_avg_sq;
    int64_t num_updates = 0;
  };
  State& state_of(size_t group, size_t index);
  at::Tensor direction(const at::Tensor& param, at::Tensor grad, State& state, double weight_decay) const;

  LAMBOptions options_;
  std::vector<std::vector<State>> states_;  // [group][parameter]
};

}  // namespace fulgur::optim
