#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "fulgur/distributed/collective.h"

namespace fulgur {

inline c10d::ReduceOp c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    default:
      return c10d::ReduceOp::SUM;
  }
}

}  // namespace fulgur
