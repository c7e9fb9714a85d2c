#include "fulgur/strategies/engine/host_adder.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "fulgur/base/intra_op_threads.h"

namespace fulgur {
namespace {

constexpr int64_t kPieceElements = 1 << 16;  // what an addition widens first stays in the cache

JobQueue make_threads(int64_t num_threads) {
  const ScopedIntraOpThreads restored;
  return JobQueue(static_cast<size_t>(num_threads), use_one_intra_op_thread);
}

}  // namespace

HostAdder::HostAdder(int64_t num_threads)
    : num_threads_(std::max<int64_t>(1, num_threads)), threads_(make_threads(num_threads_)) {}

void HostAdder::set(const at::Tensor& sum, const at::Tensor& term) {
  in_parts(sum, term, [](at::Tensor to, const at::Tensor& from) { to.copy_(from); });
}

void HostAdder::add(const at::Tensor& sum, const at::Tensor& term) {
  in_parts(sum, term, [](at::Tensor to, const at::Tensor& from) { to.add_(from); });
}

template <class Combine>
void HostAdder::in_parts(const at::Tensor& sum, const at::Tensor& term, const Combine& combine) {
  const int64_t num_elements = sum.numel();
  const int64_t num_pieces = (num_elements + kPieceElements - 1) / kPieceElements;
  const int64_t num_parts = std::min(num_threads_, num_pieces);
  run_parts(threads_, num_parts, [&](int64_t p) {
    const c10::NoGradGuard no_grad;
    for (int64_t piece = num_pieces * p / num_parts; piece < num_pieces * (p + 1) / num_parts; ++piece) {
      const int64_t begin = piece * kPieceElements, size = std::min(kPieceElements, num_elements - begin);
      combine(sum.narrow(0, begin, size), term.narrow(0, begin, size));
    }
  });
}

}  // namespace fulgur
