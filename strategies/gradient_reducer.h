#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <vector>

#include "device/side_worker.h"
#include "distributed/collective.h"
#include "strategies/flat_parameters.h"

namespace fulgur {

struct ReduceOptions {
  bool shard = false;       // a rank keeps its range of each bucket only: reduce_scatter in the place of all_reduce
  bool rank_order = false;  // add in the order of ranks: bits do not depend on where buckets end, from 3 ranks on

  // Rather than take more than two buckets from the pool, a gradient waits for the other ranks. It must not where a
  // backward function waits for them, too (SyncBatchNorm): they may be waiting there for this one.
  bool waits_for_memory = true;

  // Buckets are launched in the order in which the first backward fills them, and not in their own.
  bool learns_order = true;

  // Memory for the sums of a bucket, in sections that make up the rank's range, or with several ranks and without
  // `shard` the bucket, in the parameters' dtype or in fp32. Sums are kept there, and parameters have no gradients.
  // Must be set with `shard`.
  std::function<std::vector<at::Tensor>(size_t bucket)> make_sums{};
  SideWorker* keeper = nullptr;  // copies them there while backward goes on; unset: the thread of backward does
};

// Sums gradients over ranks, bucket by bucket, while backward still runs. A hook moves a finished gradient into its
// bucket; a full bucket starts its all_reduce, in one order of buckets on every rank, whatever order gradients come in:
// at first that of the parameters' buckets, then the one in which rank 0's first backward filled them.
//   reducer.begin();                    // from here on finished gradients are on their way
//   loss.backward();
//   reducer.finish(extra);              // waits; the rest of the buckets, and what else the ranks tell each other
// On a CPU what else they tell each other goes with the last bucket, in one message, if gradients have 32 bits or more,
// stay in their buckets (no make_sums), and belong to one optimizer.
// Afterwards a gradient is a view of its bucket, until zero_grad drops it. A parameter that no rank has a gradient for
// has none; one that some have counts as zero on the others.
//   With make_sums the memory of a bucket is taken from a pool, of two buckets if gradients come in their order, and
// what stays is sums(bucket), to which those of further reductions are added until clear(). A gradient that fills its
// bucket alone is the bucket itself, so that the pool does not keep as much as the largest parameter. Where a rank
// keeps the whole of a bucket in one section on the same device, the first gradients are reduced in the memory of the
// sums, and with one rank further ones are added there, too: without a pool, and the keeper brings them there.
// Parameters then have no gradients. Sums of 16 bits are widened to fp32 by the second micro-batch, unless make_sums
// makes fp32 ones.
//   Ownership: borrows all three, installs hooks on the parameters until it goes. A parameter's own hook is called
// first. Threading: backward's and the training thread, never at once.
// Source: Li et al. 2020, arXiv:2006.15704.
class GradientReducer {
 public:
  GradientReducer(const FlatParameters& parameters, Collective& data, Collective& control, ReduceOptions options = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // `measures`: with make_sums, so that finish() leaves norms().
  void begin(bool measures = false);

  // With make_sums: what is kept of a bucket, empty if nothing was reduced since clear(); and how often a rank had a
  // gradient, by slot.
  const std::vector<at::Tensor>& sums(size_t bucket) const;
  void widen_sums(size_t bucket);  // of 16 bits, to fp32, until clear()
  // The 2-norms of sums(bucket), each in fp64, taken while backward goes on; empty where they are not known.
  const std::vector<at::Tensor>& norms(size_t bucket) const { return buckets_[bucket].norms; }

  const std::vector<double>& used(size_t bucket) const { return buckets_[bucket].used; }
  void set_used(size_t bucket, size_t slot, bool used) { buckets_[bucket].used[slot] = used ? 1.0 : 0.0; }
  void clear();

  // Hands the memory of sums(bucket) over; the next ones are kept in other memory, until give_back() new one.
  std::vector<at::Tensor> take_sums(size_t bucket);
  void give_back(size_t bucket, std::vector<at::Tensor> sums);

  // `extra`, up to kMaxExtra whole numbers, is summed over ranks in place, in the message that says which parameters
  // were used. Throws DistributedError; SetupError for a sparse gradient.
  void finish(std::vector<double>& extra);
  static constexpr size_t kMaxExtra = 8;

  // Bytes that the pool comes to hold if gradients come in the order of buckets of these bytes: of those that take
  // memory from it.
  static int64_t pool_bytes(const std::vector<int64_t>& bucket_bytes);

 private:
  static constexpr size_t kPooledBuckets = 2;

  struct Bucket {
    at::Tensor gradients;       // as the parameters' bucket; made for the first reduction, or from the pool
    std::vector<bool> is_full;  // by slot
    size_t num_full = 0;
    bool launched = false;
    Work work{};
    std::vector<at::Tensor> memory{};  // from make_sums
    std::vector<at::Tensor> spare{};   // given back
    bool is_of_pool = false;           // the memory of `gradients`
    bool is_in_sums = false;           // `gradients` are `sums`
    bool is_added_to = false;          // they hold those of further micro-batches already
    bool goes_into_sums = false;       // the reduce_scatter writes `sums`; `gradients` are of the pool
    std::vector<at::Tensor> sums{};    // that, or its fp32 where 16-bit sums were added
    bool has_sums = false;
    std::vector<at::Tensor> arrived{};  // by slot: gradients that the keeper is to bring into the bucket
    std::shared_future<void> kept{};    // by the keeper
    std::vector<at::Tensor> norms{};    // of sums
    std::vector<double> used{};
  };
  class Hook;

  void on_gradient(size_t bucket, size_t slot);
  void take_gradient(size_t bucket, size_t slot);
  void put_into_bucket(size_t bucket, size_t slot, const at::Tensor& gradient);
  bool becomes_bucket(size_t bucket, const at::Tensor& gradient) const;
  void make_bucket_of_gradient(size_t bucket);
  bool has_to_wait() const { return options_.waits_for_memory && in_flight_.size() >= kPooledBuckets; }
  bool keeper_fills(size_t bucket) const;
  void ensure_memory(size_t bucket);
  void launch(size_t bucket);
  void launch_rest(size_t num_buckets);
  size_t num_early() const;
  void learn_order();
  bool keeps_sums() const { return options_.make_sums != nullptr; }
  bool reduces_in_sums(size_t bucket) const;
  bool can_reduce_into_sums(size_t bucket) const;
  void begin_in_sums(size_t bucket);
  void add_to_sums(size_t bucket);
  void finish_oldest();
  void fill_up(size_t bucket);
  std::vector<double> message_of(const std::vector<double>& extra) const;
  std::vector<double> exchange(std::vector<double> message);
  std::vector<double> exchange_with_last_bucket(const std::vector<double>& message);
  void add_used(const std::vector<double>& used);
  void hand_out(size_t bucket, std::span<const double> used);

  const FlatParameters& parameters_;
  Collective& data_;
  Collective& control_;
  ReduceOptions options_;
  std::vector<Bucket> buckets_;   // as those of the parameters
  int64_t message_room_ = 0;      // elements behind the last bucket's gradients; 0: messages go by the control group
  std::deque<size_t> in_flight_;  // whose sums are not kept yet
  std::vector<at::Tensor> pool_;  // memory that no bucket has now, the shortest first
  bool reducing_ = false;
  bool measures_ = false;
  std::vector<size_t> order_;    // buckets in the order of launches
  std::vector<size_t> places_;   // each bucket's place in order_
  size_t next_ = 0;              // place of the bucket that is launched next
  bool learns_order_;            // order_ is not that of a backward yet
  std::vector<int64_t> filled_;  // buckets, in the order in which this backward filled them
};

}  // namespace fulgur
