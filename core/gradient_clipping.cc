#include "core/gradient_clipping.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace fulgur {

at::Tensor gradient_norm(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) gradients.push_back(param.grad());
  }
  return joint_norm(gradients);
}

at::Tensor joint_norm(const std::vector<at::Tensor>& tensors) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) {
    norms.push_back(at::linalg_vector_norm(tensor, 2, std::nullopt, /*keepdim=*/false, at::kDouble));
  }
  if (norms.empty()) return at::zeros({}, at::kDouble);
  return at::linalg_vector_norm(at::stack(norms), 2);
}

at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm) {
  return norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
}

void clip_gradients(const std::vector<at::Tensor>& params, const GradientClipping& clipping) {
  if (!clipping.active()) return;
  const c10::NoGradGuard no_grad;
  if (clipping.algorithm == ClipAlgorithm::norm) {
    scale_gradients(params, clip_coefficient(gradient_norm(params), clipping.value));
    return;
  }
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) param.mutable_grad().clamp_(-clipping.value, clipping.value);
  }
}

void scale_gradients(const std::vector<at::Tensor>& params, const at::Tensor& factor) {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) param.mutable_grad().mul_(factor);
  }
}

}  // namespace fulgur
