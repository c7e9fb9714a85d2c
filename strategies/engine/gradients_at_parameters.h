#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "fulgur/strategies/engine/gradient_memory.h"
#include "fulgur/strategies/engine/gradient_store.h"
#include "fulgur/strategies/engine/parameter_versions.h"

namespace fulgur {

// Gradients stay where autograd puts them, and the optimizer's kernel reads them there. With one rank on a CPU large
// ones have memory that stays from step to step.
class GradientsAtParameters : public GradientStore {
 public:
  explicit GradientsAtParameters(GradientContext context) : context_(std::move(context)) { add_memory(); }

  void append() override { add_memory(); }
  ScopedGradientMemory begin_backward(bool /*is_last*/) override { return memory_.open(); }
  at::Tensor norm(size_t optimizer) override;
  void show(size_t optimizer) override;
  void update(size_t optimizer, const GradientTransform& transform, const std::vector<double>& next_lr,
              bool late) override;
  std::vector<ExactValues> exact_values(size_t bucket, ElementRange within) const override;
  void save(StrategyState& state) override;
  void load(const State& shared, const ReadRange& read, bool late) override;
  void parameters_were_written() override { versions_.remember(context_.parameters); }

 protected:
  const GradientContext& context() const { return context_; }

 private:
  void add_memory();
  void check_dense(size_t optimizer) const;

  // Warns if others have written to a parameter that is the rounding of an fp32 master since the last update: the next
  // one overwrites it. Returns whether the optimizer has such parameters.
  bool look_for_lost_writes(size_t optimizer);

  const GradientContext context_;
  GradientMemory memory_{};  // empty with several ranks
  size_t num_buckets_ = 0;   // the first ones, whose gradients have memory there
  ParameterVersions versions_{};
};

}  // namespace fulgur
