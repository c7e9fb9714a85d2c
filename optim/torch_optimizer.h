#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <utility>

#include "fulgur/core/optimizer.h"

namespace fulgur::optim {

// Any optimizer of torch::optim (Adam, AdamW, SGD, RMSprop, Adagrad, LBFGS), or of a class derived from one:
//   return optim::TorchOptimizer(torch::optim::RMSprop(parameters(), 1e-3));
// lr and weight_decay are those of groups(), so that schedules and checkpoints reach them; other settings stay as
// constructed. Gradients are transformed in a separate pass before the step; LBFGS, which computes gradients itself,
// takes them untransformed.
class TorchOptimizer final : public Optimizer {
 public:
  // Throws UsageError for any other class: there is no safe way to keep its state in a checkpoint.
  template <std::derived_from<torch::optim::Optimizer> T>
  explicit TorchOptimizer(T optimizer) : TorchOptimizer(std::make_unique<T>(std::move(optimizer))) {}
  explicit TorchOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer);

  void add_param_group(ParamGroup group) override;  // throws UsageError: torch needs all groups from the start
  using Optimizer::step;
  void step(const GradientTransform& transform) override;
  bool needs_closure() const override { return needs_closure_; }
  void step(const Closure& closure) override;

  // The state has torch's names, "0/3/exp_avg" for parameter 3 of group 0, and the "class". Loading copies it, and
  // throws CheckpointError if the state is another class's or does not fit the parameters. The archives that
  // torch::optim writes, which older checkpoints have, are refused: reading one can run code.
  State state() const override;
  void load_state(const State& state) override;

 private:
  void take_settings_of_groups();

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  bool needs_closure_;
};

}  // namespace fulgur::optim
