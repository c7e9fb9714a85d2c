#pragma once

#include <torch/types.h>

#include <cstdint>

#include "fulgur/distributed/collective.h"

namespace fulgur::testing {

// Element i of rank r, exact in every dtype.
inline at::Tensor values_of(int64_t rank, int64_t size, at::ScalarType dtype) {
  if (dtype == at::kBool) return (torch::arange(size) % 3).eq(rank % 3);
  return ((rank + 1) * (torch::arange(size) % 7 + 1)).to(dtype);
}

inline at::Tensor reduced(int64_t world_size, int64_t size, at::ScalarType dtype, ReduceOp op) {
  at::Tensor total = values_of(0, size, dtype);
  for (int64_t rank = 1; rank < world_size; ++rank) {
    const at::Tensor value = values_of(rank, size, dtype);
    total = op == ReduceOp::sum   ? total + value
            : op == ReduceOp::min ? at::minimum(total, value)
                                  : at::maximum(total, value);
  }
  return total;
}

}  // namespace fulgur::testing
