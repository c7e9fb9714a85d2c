#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fulgur {

enum class ClipAlgorithm {
  norm,   // all gradients are scaled so that their joint L2 norm is at most `value`
  value,  // each element is cut to [-value, value]
};

// Bounds the gradients before an optimizer step.
struct GradientClipping {
  double value = 0.0;  // the bound; 0: no clipping
  ClipAlgorithm algorithm = ClipAlgorithm::norm;
  bool active() const { return value > 0.0; }
  bool operator==(const GradientClipping&) const = default;
};

// joint_norm() of the parameters' gradients.
at::Tensor gradient_norm(const std::vector<at::Tensor>& params);

// The joint L2 norm of tensors on one device: fp64, 0-dim, on that device. On a CPU the bits depend neither on the
// number of threads nor on the instruction set, except for fp16 and for tensors with gaps or overlapping elements.
at::Tensor joint_norm(const std::vector<at::Tensor>& tensors);

// The factor that clips gradients of this norm: min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_ does.
at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm);

// For an update that multiplies its gradients by `mean`; `norm` is their joint_norm before that. The result has the
// norm of the multiplied gradients, and the factor that both multiplies and clips: mean times clip_coefficient. Both
// are fp64, 0-dim, on the device of `norm`. On a GPU this takes one launch and does not wait for the device.
struct ClippedNorm {
  at::Tensor norm, factor;
};
ClippedNorm clip_norm(const at::Tensor& norm, double mean, double max_norm);

// Clips the gradients in place. Parameters without a gradient are left out.
void clip_gradients(const std::vector<at::Tensor>& params, const GradientClipping& clipping);

// Multiplies the gradients in place by a 0-dim tensor on their device.
void scale_gradients(const std::vector<at::Tensor>& params, const at::Tensor& factor);

}  // namespace fulgur
