#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "fulgur/strategies/engine/gradient_store.h"

namespace fulgur {

// Gradients stay where autograd puts them, and the optimizer's kernel reads them there.
class GradientsAtParameters : public GradientStore {
 public:
  explicit GradientsAtParameters(GradientContext context) : context_(std::move(context)) {}

  at::Tensor norm(size_t optimizer) override;
  void show(size_t optimizer) override;
  void update(size_t optimizer, const GradientTransform& transform, const std::vector<double>& next_lr,
              bool late) override;
  std::vector<ExactValues> exact_values(size_t bucket, ElementRange within) const override;
  void save(StrategyState& state) override;
  void load(const State& shared, const ReadRange& read, bool late) override;

 protected:
  const GradientContext& context() const { return context_; }

 private:
  std::vector<at::Tensor> gradients(size_t optimizer) const;

  const GradientContext context_;
};

}  // namespace fulgur
