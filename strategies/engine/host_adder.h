#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fulgur/base/job_queue.h"

namespace fulgur {

// Adds gradients that have come from a GPU to sums on the host, on several threads: one thread adds 16-bit gradients to
// fp32 sums much slower than they come. The sums have the same bits for any number of threads. Tensors are 1-dim,
// contiguous, of equal length and on the CPU; `sum` may be wider than the other. Threading: one thread at a time.
class HostAdder {
 public:
  explicit HostAdder(int64_t num_threads);

  void set(const at::Tensor& sum, const at::Tensor& term);  // sum = term
  void add(const at::Tensor& sum, const at::Tensor& term);  // sum += term

 private:
  template <class Combine>
  void in_parts(const at::Tensor& sum, const at::Tensor& term, const Combine& combine);

  const int64_t num_threads_;
  JobQueue threads_;
};

}  // namespace fulgur
