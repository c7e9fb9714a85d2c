#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace fulgur {

enum class ReduceOp { sum, min, max };  // of bool: or, and, or

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
// the current stream wait. A Work that is dropped goes on by itself, but
// may never write its tensor. Must not outlive the Collective.
// Errors: wait() throws DistributedError naming the rank at fault and what it was doing, and again when called again.
class [[nodiscard]] Work {
 public:
  Work() = default;  // done already
  explicit Work(std::function<void()> wait) : wait_(std::move(wait)) {}

  void wait() {
    if (wait_) wait_();
    wait_ = nullptr;
  }

 private:
  std::function<void()> wait_;
};

// A group of ranks that exchange flat tensors: 1-dimensional, contiguous, of fp32, fp64, bf16, fp16, int32, int64,
// uint8 or bool, of the same size and dtype on every rank, on the group's kind of device. All but reduce_scatter work
// in place. Every rank of the group calls the same members in the same order, from one thread at a time; calls return
// at once and run while the caller goes on. The order of additions depends on the group alone for reduce_scatter; for
// all_reduce see C10dCollective. Errors: c10::ValueError for a tensor of another kind. DistributedError, from the call
// or from wait(), when a rank is missing, has failed or does not answer within the group's timeout; the group is then
// dead and every call throws that.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual int64_t rank() const = 0;  // within this group
  virtual int64_t world_size() const = 0;

  // Every rank gets the reduction of all.
  virtual Work all_reduce(at::Tensor flat, ReduceOp op = ReduceOp::sum) = 0;

  // Rank r gets the reduction of rank_range(r), there or in `into`, of so many elements, like them. What the rest of
  // the tensor holds afterwards is not specified.
  virtual Work reduce_scatter(at::Tensor flat, ReduceOp op = ReduceOp::sum, at::Tensor into = {}) = 0;

  // Rank r gives rank_range(r); every rank gets all of them.
  virtual Work all_gather(at::Tensor flat) = 0;

  // Every rank gets what rank `root` has.
  virtual Work broadcast(at::Tensor flat, int64_t root) = 0;

  // Returns when every rank has called it.
  virtual void barrier() = 0;

  // A group of some of these ranks, numbered in the order given. Called by all ranks of this group with the same list;
  // null on those that are not in it.
  virtual std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) = 0;
};

// What every Collective asks of its arguments. Throws c10::ValueError.
void check_flat(const at::Tensor& flat);
void check_into(const at::Tensor& into, const at::Tensor& range);
void check_root(int64_t root, int64_t world_size);
void check_ranks(const std::vector<int64_t>& ranks, int64_t world_size);

}  // namespace fulgur
