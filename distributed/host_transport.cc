#include "fulgur/distributed/host_transport.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "fulgur/distributed/add_in_order.h"

namespace fulgur {
namespace {

template <class T>
void add_rows(const at::Tensor& out, const std::vector<at::Tensor>& parts) {
  std::vector<const T*> rows;
  for (const at::Tensor& part : parts) rows.push_back(part.const_data_ptr<T>());
  add_in_order(out.mutable_data_ptr<T>(), rows.data(), rows.size(), static_cast<size_t>(out.numel()));
}

void combine_piece(at::Tensor out, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      at::add_out(out, a, b);
      return;
    case ReduceOp::min:
      at::minimum_out(out, a, b);
      return;
    case ReduceOp::max:
      at::maximum_out(out, a, b);
      return;
  }
}

}  // namespace

at::Tensor HostTransport::allocate(int64_t num_elements, c10::ScalarType dtype) {
  return at::zeros({num_elements}, dtype);
}

bool is_small(const at::Tensor& flat, int64_t world_size) {
  return static_cast<int64_t>(flat.nbytes()) * (world_size - 1) <= kSmallBytes;
}

// Works in pieces so small that ATen stays on this thread: a second team of OpenMP threads would compete with the one
// that computes gradients.
void combine(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const at::NoGradGuard no_grad;
  const int64_t size = out.numel();
  for (int64_t begin = 0; begin < size; begin += at::internal::GRAIN_SIZE) {
    const auto piece = [&](const at::Tensor& whole) {
      return whole.narrow(0, begin, std::min(at::internal::GRAIN_SIZE, size - begin));
    };
    combine_piece(piece(out), piece(a), piece(b), op);
  }
}

void add_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts) {
  switch (out.scalar_type()) {
    case at::kFloat:
      return add_rows<float>(out, parts);
    case at::kDouble:
      return add_rows<double>(out, parts);
    case at::kBFloat16:
      return add_rows<c10::BFloat16>(out, parts);
    case at::kHalf:
      return add_rows<c10::Half>(out, parts);
    default:
      TORCH_INTERNAL_ASSERT(false, out.scalar_type());
  }
}

}  // namespace fulgur
