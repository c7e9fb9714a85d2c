#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/trace.h"

namespace fulgur {

enum class ReduceOp { sum, min, max };  // for bool: or, and, or

// Elements [begin, end) of a flat tensor.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  at::Tensor of(const at::Tensor& flat) const { return flat.narrow(0, begin, size()); }  // a view
};

// The part of a flat tensor that belongs to `rank`: ceil(num_elements / world_size) elements; the last parts may be
// shorter, or empty.
ElementRange rank_range(int64_t num_elements, int64_t rank, int64_t world_size);

// A collective that was started; it uses its tensor until wait() has returned. On a CPU wait() blocks; on CUDA it makes
// the current stream wait. The collective of a dropped Work continues, but may never write its tensor. A Work must not
// outlive its Collective. Errors: wait() throws DistributedError, which names the rank at fault and what that rank was
// doing; a repeated call throws it again.
class [[nodiscard]] Work {
 public:
  Work() = default;  // a completed collective
  explicit Work(
      std::function<void()> wait, std::function<bool()> is_done = [] { return false; })
      : wait_(std::move(wait)), is_done_(std::move(is_done)) {}

  void wait() {
    const trace::Span span("wait for ranks");
    if (wait_) wait_();
    wait_ = nullptr;
  }

  // True if wait() is known to return, or throw, at once.
  bool is_done() const { return !wait_ || is_done_(); }

 private:
  std::function<void()> wait_;
  std::function<bool()> is_done_;
};

// A group of ranks that exchange flat tensors: 1-dimensional, contiguous, of fp32, fp64, bf16, fp16, int32, int64,
// uint8 or bool, with the same size and dtype on every rank, on the group's kind of device. All collectives except
// reduce_scatter work in place. Every rank of the group makes the same calls in the same order, from one thread at a
// time; calls return at once and run in the background. The order of additions depends on the group alone for
// reduce_scatter; for all_reduce see TransportOptions. Errors: c10::ValueError for a tensor of another kind.
// DistributedError, from the call or from wait(), when a rank is missing, has failed or does not answer within the
// group's timeout; the group is then dead, and every later call throws the same error.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual int64_t rank() const = 0;  // within this group
  virtual int64_t world_size() const = 0;

  // Every rank gets the reduction over all ranks.
  virtual Work all_reduce(at::Tensor flat, ReduceOp op = ReduceOp::sum) = 0;

  // Whether all_reduce adds in the order of ranks, as reduce_scatter does: its bits then do not depend on the
  // length of the tensor, nor on where it begins.
  virtual bool adds_in_rank_order() const { return false; }

  // Rank r gets the reduction of rank_range(r), either in place or in `into`, a tensor with that number of elements.
  // The rest of `flat` is unspecified afterwards.
  virtual Work reduce_scatter(at::Tensor flat, ReduceOp op = ReduceOp::sum, at::Tensor into = {}) = 0;

  // Rank r contributes rank_range(r); every rank gets all ranges.
  virtual Work all_gather(at::Tensor flat) = 0;

  // Every rank gets the tensor of rank `root`.
  virtual Work broadcast(at::Tensor flat, int64_t root) = 0;

  // Returns when every rank has called it.
  virtual void barrier() = 0;

  // Returns zeros in memory from which this group moves a flat tensor with the fewest copies, if all ranks pass such
  // tensors: for tensors that are exchanged again and again. The memory lasts as long as a tensor uses it. Threading:
  // any thread; a rank may call it alone.
  virtual at::Tensor allocate(int64_t num_elements, const at::TensorOptions& options);

  // A group of some of these ranks, numbered in the given order. All ranks of this group call it with the same list; it
  // returns null on ranks that are not in the list.
  virtual std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) = 0;

  // Another group of all these ranks, whose calls are independent of this group's. All ranks call it.
  std::shared_ptr<Collective> duplicate();

  // Makes running and later calls throw a DistributedError, on this and the other ranks, also in the groups that
  // sub_group() and duplicate() have made. `reason` is the message of that error on this rank; if it is empty, another
  // rank is at fault, which the error then names. Threading: any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// An all_reduce with the bits of a reduce_scatter, over every transport.
Work all_reduce_in_rank_order(Collective& group, const at::Tensor& flat, ReduceOp op = ReduceOp::sum);

// Checks of arguments that every Collective makes. Throw c10::ValueError.
void check_flat(const at::Tensor& flat);
void check_into(const at::Tensor& into, const at::Tensor& range);
void check_root(int64_t root, int64_t world_size);
void check_ranks(const std::vector<int64_t>& ranks, int64_t world_size);

}  // namespace fulgur
