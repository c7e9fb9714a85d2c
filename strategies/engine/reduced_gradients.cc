#include "fulgur/strategies/engine/reduced_gradients.h"

#include <ATen/ops/scalar_tensor.h>

#include <utility>
#include <vector>

#include "fulgur/core/module.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/optim/gradient_divisor.h"

namespace fulgur {

ReducedGradients::ReducedGradients(const GradientContext& context)
    : GradientsAtParameters(context),
      reducer_(context.parameters, context.world().data(), context.world().control(),
               {.rank_order = context.setup.deterministic,
                .wire = context.engine.wire,
                .learns_order = context.setup.reduces_during_backward && context.module.automatic_optimization}) {}

ScopedGradientMemory ReducedGradients::begin_backward(bool is_last) {
  if (is_last && context().setup.reduces_during_backward) reducer_.begin();
  return reducer_.open_memory();
}

std::optional<AccumulationWindow> ReducedGradients::end_micro_batch(const AccumulationWindow& mine, bool is_last) {
  if (!is_last) return std::nullopt;
  return finish_window(reducer_, mine);
}

void ReducedGradients::add_mean(const std::function<void()>& backward) {
  std::vector<std::pair<at::Tensor, at::Tensor>> earlier;  // copies: gradients of the last backward lie in the buckets
  std::vector<at::Tensor> params;
  for (const auto& optimizer : context().optimizers) {
    for (const at::Tensor& param : optimizer->params()) {
      params.push_back(param);
      const at::Tensor grad = std::exchange(param.mutable_grad(), {});
      if (!grad.defined()) continue;
      earlier.emplace_back(param, grad.to(optim::widened(grad.scalar_type()), /*non_blocking=*/false, /*copy=*/true));
    }
  }
  backward();
  std::vector<double> nothing;
  reducer_.finish(nothing);
  const double share = 1.0 / static_cast<double>(context().world().world_size());
  scale_gradients(params, at::scalar_tensor(share, at::kDouble));
  for (const auto& [param, grad] : earlier) {
    param.mutable_grad() = param.grad().defined() ? grad.add(param.grad()) : grad;
  }
}

// The norm of rank 0 counts: with another number of threads the last bit could differ, and then the parameters would
// differ between ranks.
at::Tensor ReducedGradients::norm(size_t optimizer) {
  const at::Tensor of_rank_0 = GradientsAtParameters::norm(optimizer).clone().reshape({1});
  World& world = context().world();
  (of_rank_0.is_cpu() ? world.control() : world.data()).broadcast(of_rank_0, /*root=*/0).wait();
  return of_rank_0.squeeze();
}

}  // namespace fulgur
