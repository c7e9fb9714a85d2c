#include "fulgur/optim/whole_tensor.h"

namespace fulgur::optim {

at::Tensor transformed_gradient(const at::Tensor& param, const GradientTransform& transform) {
  const at::ScalarType type = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor grad = param.grad().to(type, /*non_blocking=*/false, /*copy=*/true);
  if (transform.factor.defined()) grad.mul_(transform.factor);
  if (transform.clip_value) grad.clamp_(-*transform.clip_value, *transform.clip_value);
  return grad;
}

at::Tensor ratio_or_one(const at::Tensor& numerator, const at::Tensor& denominator) {
  const at::Tensor usable = numerator.ne(0).logical_and_(denominator.ne(0));
  return numerator.div(denominator).where(usable, 1.0);
}

at::Tensor copy_of(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(tensor.options().device(device), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace fulgur::optim
