#include "optim/gradient_divisor.h"

#include "core/gradient_clipping.h"

namespace fulgur::optim {

std::optional<at::Tensor> gradient_divisor(const GradientTransform& transform, const Optimizer& optimizer) {
  if (!transform.clip_value) {
    if (!transform.factor.defined()) return std::nullopt;
    return transform.factor.reciprocal().to(at::kFloat);
  }
  const std::vector<at::Tensor> params = optimizer.params();
  if (transform.factor.defined()) scale_gradients(params, transform.factor);
  clip_gradients(params, {.value = *transform.clip_value, .algorithm = ClipAlgorithm::value});
  return std::nullopt;
}

}  // namespace fulgur::optim
