#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "fulgur/device/stream_worker.h"
#include "fulgur/distributed/collective.h"
#include "fulgur/strategies/engine/flat_parameters.h"

namespace fulgur {

struct ReduceOptions {
  bool shard = false;       // a rank keeps only its range of each bucket: reduce_scatter instead of all_reduce
  bool rank_order = false;  // add in rank order: with 3 or more ranks, bits do not depend on where buckets end

  // The type in which gradients travel, and to which their sums are rounded once; nullopt: that of the parameters. Must
  // be nullopt with one rank.
  std::optional<c10::ScalarType> wire{};

  // Whether a gradient for which the pool has no memory waits until the oldest bucket in flight is reduced, which needs
  // the other ranks. Must be false if a backward function also waits for other ranks (SyncBatchNorm), because they may
  // be waiting there for this rank. If false, a gradient takes the memory of a bucket whose sum has arrived, otherwise
  // new memory.
  bool may_wait_for_memory = true;

  // Buckets are launched in the order in which a backward fills them, not in the order of the parameters' buckets. If
  // false, every rank must freeze the same parameters before each backward; a bucket without trainable parameters then
  // does not delay other buckets.
  bool learns_order = true;

  // Makes memory for the sums of a bucket, in the parameters' dtype or in fp32: one tensor for each section of the
  // rank's range, or of the whole bucket without `shard`. If set, sums are kept there (GradientSums), and parameters
  // have no gradients; otherwise gradients are views of the reduced buckets (GradientViews). Must be set with `shard`.
  std::function<std::vector<at::Tensor>(size_t bucket)> make_sums{};
  StreamWorker* copy_worker = nullptr;  // copies sums to this memory during backward; null: the backward thread does
  int64_t host_threads = 0;  // threads that add gradients from a GPU on the host; 0: the copy worker adds them
};

// The buckets that a GradientReducer fills with gradients: their memory, and how each is summed over ranks. There is
// one for each bucket of the parameters. Calls for one bucket: put() or put_zero() for every slot, then launch().
class GradientBuckets {
 public:
  virtual ~GradientBuckets() = default;

  virtual void append() = 0;  // takes in the buckets that were appended to the parameters

  // Moves the gradient of a parameter into its bucket. `goes_soon`: the bucket is one of the next to be launched.
  virtual void put(size_t bucket, size_t slot, bool goes_soon) = 0;
  virtual void put_zero(size_t bucket, size_t slot) = 0;  // the parameter has no gradient on this rank

  virtual void launch(size_t bucket) = 0;  // starts to sum a bucket over ranks

  // Waits for the launched buckets. used[bucket][slot] is the number of ranks that had a gradient.
  virtual void finish(const std::vector<std::span<const double>>& used) = 0;
};

// Copies a gradient to its place in a bucket, or adds it there.
void copy_into(const at::Tensor& gradients, const FlatParameters::Slot& slot, const at::Tensor& grad);
void add_into(const at::Tensor& gradients, const FlatParameters::Slot& slot, const at::Tensor& grad);

// Moves the defined gradients of `arrived`, which has one entry per slot, to their places in the bucket, or adds them
// there. `together`: all in a few calls, which is faster on a GPU, instead of one call for each.
void move_into(const at::Tensor& gradients, const FlatParameters::Bucket& bucket, std::vector<at::Tensor>& arrived,
               bool adds, bool together);

// Sums the whole of a bucket over ranks.
Work reduce_whole(Collective& data, const at::Tensor& gradients, bool rank_order);

}  // namespace fulgur
