#include "optim/gradient_divisor.h"

#include "core/gradient_clipping.h"

namespace fulgur::optim {

std::optional<at::Tensor> gradient_divisor(const GradientTransform& transform, const std::vector<at::Tensor>& params) {
  if (!transform.clip_value) {
    if (!transform.factor.defined()) return std::nullopt;
    return transform.factor.reciprocal().to(at::kFloat);
  }
  transform_gradients(transform, params);
  return std::nullopt;
}

void transform_gradients(const GradientTransform& transform, const std::vector<at::Tensor>& params) {
  if (transform.factor.defined()) scale_gradients(params, transform.factor);
  if (transform.clip_value) {
    clip_gradients(params, {.value = *transform.clip_value, .algorithm = ClipAlgorithm::value});
  }
}

}  // namespace fulgur::optim
