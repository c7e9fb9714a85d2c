#include "fulgur/optim/gradient_divisor.h"

#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/fused_update.h"

namespace fulgur::optim {

std::optional<at::Tensor> gradient_divisor(const GradientTransform& transform, const std::vector<at::Tensor>& params) {
  if (!transform.clip_value) {
    if (!transform.factor.defined()) return std::nullopt;
    return transform.factor.reciprocal().to(at::kFloat);
  }
  widen_gradients(params);
  transform_gradients(transform, params);
  return std::nullopt;
}

void widen_gradients(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (grad.defined()) param.mutable_grad() = grad.to(widened(grad.scalar_type()));
  }
}

void transform_gradients(const GradientTransform& transform, const std::vector<at::Tensor>& params) {
  if (transform.factor.defined()) scale_gradients(params, transform.factor);
  if (transform.clip_value) {
    clip_gradients(params, {.value = *transform.clip_value, .algorithm = ClipAlgorithm::value});
  }
}

}  // namespace fulgur::optim
