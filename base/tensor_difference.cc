#include "fulgur/base/tensor_difference.h"

#include <ATen/ops/isnan.h>

#include <limits>

namespace fulgur {

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor same = a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return a.sub(b).abs().masked_fill(same, 0).nan_to_num(kInfinity, kInfinity).max().item<double>();
}

}  // namespace fulgur
