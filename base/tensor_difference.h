#pragma once

#include <ATen/core/Tensor.h>

namespace fulgur {

// The largest absolute difference of two floating-point tensors of the same shape, with at least one element. Two NaN
// count as equal, and so do two infinities of the same sign; infinite where only one of two elements is NaN.
double largest_difference(const at::Tensor& a, const at::Tensor& b);

}  // namespace fulgur
