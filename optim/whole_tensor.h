#pragma once

#include <ATen/core/Tensor.h>

#include "fulgur/core/optimizer.h"

// The common part of optimizers that scale the step of each tensor by norms. Nothing here waits for a device.
namespace fulgur::optim {

// The parameter's gradient after the transform: a new tensor, fp64 for a parameter in fp64, otherwise fp32.
at::Tensor transformed_gradient(const at::Tensor& param, const GradientTransform& transform);

// numerator / denominator, or 1 where one of them is 0; both 0-dim.
at::Tensor ratio_or_one(const at::Tensor& numerator, const at::Tensor& denominator);

at::Tensor copy_of(const at::Tensor& tensor, c10::Device device);

}  // namespace fulgur::optim
