#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/optimizer.h"

namespace fulgur::optim {

// What torch's fused kernels (at::_fused_*) divide each gradient by: fp32, 0-dim; nullopt for 1. They cannot clip by
// value: with a clip_value the gradients are transformed here, in a pass of their own, and nothing is left to divide
// by.
std::optional<at::Tensor> gradient_divisor(const GradientTransform& transform, const std::vector<at::Tensor>& params);

// Gradients of 16 bits become fp32.
void widen_gradients(const std::vector<at::Tensor>& params);

// The transform as a pass of its own over the parameters' gradients.
void transform_gradients(const GradientTransform& transform, const std::vector<at::Tensor>& params);

}  // namespace fulgur::optim
