#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>

#include "fulgur/strategies/engine/gradient_memory.h"
#include "fulgur/strategies/engine/gradient_reducer.h"
#include "fulgur/strategies/engine/gradients_at_parameters.h"

namespace fulgur {

// Every rank has all gradients, summed over ranks while backward runs; they are views of the reducer's buckets. Source:
// Li et al. 2020, arXiv:2006.15704.
class ReducedGradients final : public GradientsAtParameters {
 public:
  explicit ReducedGradients(const GradientContext& context);

  bool collects_in_buckets() const override { return true; }
  void append() override { reducer_.append(); }
  ScopedGradientMemory begin_backward(bool is_last) override;
  std::optional<AccumulationWindow> end_micro_batch(const AccumulationWindow& mine, bool is_last) override;
  void add_mean(const std::function<void()>& backward) override;
  at::Tensor norm(size_t optimizer) override;

 private:
  GradientReducer reducer_;
};

}  // namespace fulgur
