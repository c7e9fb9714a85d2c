#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <utility>

#include "core/optimizer.h"

namespace fulgur::optim {

// Any optimizer of torch::optim, LBFGS among them:
//   return optim::TorchOptimizer(torch::optim::RMSprop(parameters(), 1e-3));
// Learning-rate schedules reach it; its other settings, weight decay too, are what they were when it was made.
// Gradients are transformed in a pass of their own before its step; LBFGS, which computes them itself, takes them as
// they are.
class TorchOptimizer final : public Optimizer {
 public:
  template <std::derived_from<torch::optim::Optimizer> T>
  explicit TorchOptimizer(T optimizer) : TorchOptimizer(std::make_unique<T>(std::move(optimizer))) {}
  explicit TorchOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer);

  void add_param_group(ParamGroup group) override;  // throws UsageError: torch's own has to have it from the start
  using Optimizer::step;
  void step(const GradientTransform& transform) override;
  bool needs_closure() const override { return needs_closure_; }
  void step(const Closure& closure) override;
  State state() const override;  // torch's own, as one tensor of bytes
  void load_state(const State& state) override;

 private:
  void set_learning_rates();

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  bool needs_closure_;
};

}  // namespace fulgur::optim
