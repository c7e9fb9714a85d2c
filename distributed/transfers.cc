#include "distributed/transfers.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>

namespace fulgur {
namespace {

constexpr int64_t kMaxReceivedBytes = 64 << 10;

void combine_piece(at::Tensor total, const at::Tensor& value, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      total.add_(value);
      return;
    case ReduceOp::min:
      at::minimum_out(total, total, value);
      return;
    case ReduceOp::max:
      at::maximum_out(total, total, value);
      return;
  }
}

}  // namespace

bool is_small(const at::Tensor& flat, int64_t world_size) {
  return static_cast<int64_t>(flat.nbytes()) * (world_size - 1) <= kMaxReceivedBytes;
}

// In pieces so small that ATen stays on this thread: a second team of OpenMP threads would compete with the one that
// computes gradients.
void combine(const at::Tensor& total, const at::Tensor& value, ReduceOp op) {
  const at::NoGradGuard no_grad;
  const int64_t size = total.numel();
  for (int64_t begin = 0; begin < size; begin += at::internal::GRAIN_SIZE) {
    const int64_t piece = std::min(at::internal::GRAIN_SIZE, size - begin);
    combine_piece(total.narrow(0, begin, piece), value.narrow(0, begin, piece), op);
  }
}

}  // namespace fulgur
