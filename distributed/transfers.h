#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "distributed/collective.h"

namespace fulgur {

// An all_reduce that was started; nothing runs until finish(), which adds up what the other ranks have sent, on the
// thread that calls it: where few bytes are exchanged, what takes time is waking threads.
class SmallAllReduce {
 public:
  virtual ~SmallAllReduce() = default;

  virtual void finish() = 0;  // from any thread; throws again what it threw

  // Whether the other ranks can finish theirs before this one is finished.
  virtual bool is_sent() const { return true; }
};

// How the ranks of a group exchange flat tensors that lie in the memory of the host. Calls block;
// one thread at a time, and every rank makes the same calls in the same order. A reduction adds in the order of ranks,
// ((x0 + x1) + x2) + ..., so its bits depend on neither timing nor where the tensor begins, but for an all_reduce of
// Gloo's own.
// Errors: std::exception, after the group's timeout at the latest.
class Transfers {
 public:
  virtual ~Transfers() = default;

  virtual void all_reduce(const at::Tensor& flat, ReduceOp op) = 0;
  virtual void reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into) = 0;
  virtual void all_gather(const at::Tensor& flat) = 0;
  virtual void broadcast(const at::Tensor& flat, int64_t root) = 0;

  // These two also beside one of the above.
  virtual void barrier() = 0;
  virtual std::shared_ptr<SmallAllReduce> small_all_reduce(const at::Tensor& flat, ReduceOp op) = 0;

  // What runs throws, here and on every other rank, as does what is called later. From any thread.
  virtual void abort() = 0;
};

// Whether an all_reduce is to be a small one: all that a rank gets is no more than this.
inline constexpr int64_t kSmallBytes = 64 << 10;
bool is_small(const at::Tensor& flat, int64_t world_size);

// out = a (op) b; `out` may be one of them.
void combine(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, ReduceOp op);

// out = what ranks before `rank` sum to (op) own (op) those after it, of which `of_rank(r)` gives rank r's. What
// of_rank(0) returns is written to; `out` may be `own`.
template <class OfRank>
void combine_in_rank_order(const at::Tensor& out, const at::Tensor& own, int64_t rank, int64_t world_size, ReduceOp op,
                           const OfRank& of_rank) {
  at::Tensor sum = own;
  if (rank > 0) {
    const at::Tensor below = of_rank(0);
    for (int64_t peer = 1; peer < rank; ++peer) combine(below, below, of_rank(peer), op);
    combine(out, sum, below, op);
    sum = out;
  }
  for (int64_t peer = rank + 1; peer < world_size; ++peer) {
    combine(out, sum, of_rank(peer), op);
    sum = out;
  }
  if (world_size == 1 && out.data_ptr() != own.data_ptr()) out.copy_(own);
}

}  // namespace fulgur
