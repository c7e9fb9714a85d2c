#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "fulgur/distributed/collective.h"

namespace fulgur {

// An all_reduce of few bytes that was started. The start may already send this rank's tensor. finish() waits for the
// tensors of the other ranks and sums on the calling thread: waking another thread would take longer than the sum.
class SmallAllReduce {
 public:
  virtual ~SmallAllReduce() = default;

  virtual void finish() = 0;  // from any thread; a repeated call throws the same error

  // Whether the other ranks can finish their all_reduces before this one is finished.
  virtual bool is_sent() const { return true; }
};

// The elements of a flat tensor that a collective uses, by rank: rank r owns `size` elements from `first + r * stride`
// on, cut off at the end of the tensor. 0 < size <= stride.
struct RankRanges {
  int64_t first = 0;
  int64_t stride = 0;
  int64_t size = 0;

  static RankRanges of_whole(const at::Tensor& flat, int64_t world_size) {  // as rank_range() divides it
    const int64_t size = std::max<int64_t>(rank_range(flat.numel(), 0, world_size).size(), 1);
    return {.first = 0, .stride = size, .size = size};
  }

  ElementRange range(int64_t rank, const at::Tensor& flat) const {
    const int64_t begin = std::min(first + rank * stride, flat.numel());
    return {begin, std::min(begin + size, flat.numel())};
  }
  at::Tensor of(const at::Tensor& flat, int64_t rank) const { return range(rank, flat).of(flat); }
};

// How the ranks of a group exchange flat tensors in host memory. Calls block. Every rank makes the same calls in the
// same order. A reduction adds in the order of ranks, ((x0 + x1) + x2) + ..., so its bits depend on neither timing nor
// where the tensor begins, except for Gloo's own all_reduce. Sums of 16-bit numbers are added in fp32 and
// rounded once, on several hosts once by each host and once across hosts. Threading: one thread at a time, except where
// noted. Errors: std::exception, after the group's timeout at the latest.
class HostTransport {
 public:
  virtual ~HostTransport() = default;

  virtual void all_reduce(const at::Tensor& flat, ReduceOp op) = 0;
  virtual bool all_reduces_in_rank_order() const { return false; }  // as reduce_scatter adds
  virtual void reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into,
                              const RankRanges& ranges) = 0;
  virtual void all_gather(const at::Tensor& flat, const RankRanges& ranges) = 0;
  virtual void broadcast(const at::Tensor& flat, int64_t root) = 0;

  // These two may also run concurrently with one of the above.
  virtual void barrier() = 0;
  virtual std::shared_ptr<SmallAllReduce> small_all_reduce(const at::Tensor& flat, ReduceOp op) = 0;

  // Makes running and later calls throw, here and on every other rank. Threading: any thread.
  virtual void abort() = 0;

  // Ends the transport: no further call may follow, and running calls throw. Threading: any thread.
  virtual void end() { abort(); }

  // Zeros, in the memory from which collectives move tensors with the fewest copies. Threading: any thread.
  virtual at::Tensor allocate(int64_t num_elements, c10::ScalarType dtype);
};

// An all_reduce is small if the other ranks' tensors together have at most this many bytes.
inline constexpr int64_t kSmallBytes = 64 << 10;
bool is_small(const at::Tensor& flat, int64_t world_size);

// out = a (op) b; `out` may be `a` or `b`.
void combine(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, ReduceOp op);

// out = parts[0] + parts[1] + ..., in this order, for floating-point numbers; those of 16 bits are added in fp32 and
// rounded once. `out` may be one of the parts.
void add_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts);

// out = x0 (op) x1 (op) ..., in the order of ranks; sums are made in one pass over all. Here x_rank is `own`
// and of_rank(r) returns the tensor of another rank r. The tensor that of_rank(0) returns is overwritten; `out` may be
// `own`.
template <class OfRank>
void combine_in_rank_order(const at::Tensor& out, const at::Tensor& own, int64_t rank, int64_t world_size, ReduceOp op,
                           const OfRank& of_rank) {
  if (op == ReduceOp::sum && at::isFloatingType(out.scalar_type())) {
    std::vector<at::Tensor> parts;
    for (int64_t peer = 0; peer < world_size; ++peer) parts.push_back(peer == rank ? own : of_rank(peer));
    return add_in_order(out, parts);
  }
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
