#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "fulgur/core/optimizer.h"

namespace fulgur::optim {

// The number by which torch's fused kernels (at::_fused_*) divide each gradient: fp32, 0-dim; nullopt for 1. The
// kernels cannot clip by value: with a clip_value the gradients are transformed here, in a separate pass, and the
// result is nullopt.
std::optional<at::Tensor> gradient_divisor(const GradientTransform& transform, const std::vector<at::Tensor>& params);

// Converts 16-bit gradients to fp32.
void widen_gradients(const std::vector<at::Tensor>& params);

// Applies the transform to the parameters' gradients, in a separate pass.
void transform_gradients(const GradientTransform& transform, const std::vector<at::Tensor>& params);

}  // namespace fulgur::optim
