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

// The joint L2 norm of tensors of one device: fp64, 0-dim, on it. On a CPU the bits do not depend on the number of
// threads or on the instruction set, but for fp16 and for tensors with gaps or elements that share an address.
at::Tensor joint_norm(const std::vector<at::Tensor>& tensors);

// The factor that clips gradients of this norm: min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_ does.
at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm);

// The norm of gradients that the update will multiply by `mean`, and the factor by which it multiplies them so that the
// result is clipped, too: mean times the clip_coefficient. Both fp64, 0-dim, on the device of `norm`, the joint_norm of
// the gradients as they are. One launch on a GPU, and nothing waits for it.
struct ClippedNorm {
  at::Tensor norm, factor;
};
ClippedNorm clip_norm(const at::Tensor& norm, double mean, double max_norm);

// Clips the gradients in place. Parameters without a gradient are left out.
void clip_gradients(const std::vector<at::Tensor>& params, const GradientClipping& clipping);

// Multiplies the gradients in place by a 0-dim tensor on their device.
void scale_gradients(const std::vector<at::Tensor>& params, const at::Tensor& factor);

}  // namespace fulgur
