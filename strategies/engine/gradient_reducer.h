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

#include "fulgur/device/side_worker.h"
#include "fulgur/distributed/collective.h"
#include "fulgur/strategies/engine/flat_parameters.h"

namespace fulgur {

struct ReduceOptions {
  bool shard = false;       // a rank keeps only its range of each bucket: reduce_scatter instead of all_reduce
  bool rank_order = false;  // add in rank order: with 3 or more ranks, bits do not depend on where buckets end

  // A gradient waits for the other ranks rather than take a third bucket from the pool. Must be false if a backward
  // function waits for other ranks, too (SyncBatchNorm): they may be waiting there for this rank.
  bool waits_for_memory = true;

  // Buckets are launched in the order in which a backward fills them, not in the order of the parameters' buckets. If
  // false, every rank freezes the same parameters before each backward: buckets without a trainable one do not make
  // others wait.
  bool learns_order = true;

  // Makes memory for the sums of a bucket, in the parameters' dtype or in fp32: sections that make up the rank's
  // range, or without `shard` the whole bucket. If set, sums are kept there, and parameters have no gradients. Must
  // be set with `shard`.
  std::function<std::vector<at::Tensor>(size_t bucket)> make_sums{};
  SideWorker* keeper = nullptr;  // copies sums there while backward runs; null: the backward thread copies
};

// Sums gradients over ranks, bucket by bucket, while backward still runs. A hook moves a finished gradient into its
// bucket; a full bucket starts its all_reduce, in one order of buckets on every rank, whatever order gradients come
// in: at first the order of the parameters' buckets, then the order in which rank 0's first backward filled them.
//   reducer.begin();                    // from here on, finished gradients are sent
//   loss.backward();
//   reducer.finish(extra);              // sends the remaining buckets and `extra`, and waits for the sums
// On a CPU `extra` and the last bucket are one message if gradients have 32 bits or more, stay in their buckets (no
// make_sums), and belong to one optimizer.
// Afterwards a gradient is a view of its bucket, until zero_grad drops it. A parameter that has a gradient on no rank
// gets none; if only some ranks have a gradient, it counts as zero on the others.
//   With make_sums the memory of a bucket is taken from a pool, which holds two buckets if gradients come in the order
// of buckets. The results are sums(bucket), to which further reductions are added until clear(). A gradient that fills
// its bucket alone becomes the bucket, so that the pool does not grow to the largest parameter. If a rank keeps the
// whole of a bucket in one section on the same device, the first gradients are reduced in the memory of the sums, and
// with one rank further gradients are added there, too; this takes no pool, and the keeper copies the gradients.
// Parameters then have no gradients. 16-bit sums are widened to fp32 by the second micro-batch, unless make_sums makes
// fp32 tensors.
//   Ownership: borrows parameters and collectives; its hooks stay on the parameters until the destructor. A hook that
// a parameter has already is called first. Threading: the backward and the training thread, never at once.
// Source: Li et al. 2020, arXiv:2006.15704.
class GradientReducer {
 public:
  GradientReducer(const FlatParameters& parameters, Collective& data, Collective& control, ReduceOptions options = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Takes in the buckets that were appended to the parameters. Between finish() and begin(), on every rank.
  void append();

  // `measures`: finish() leaves norms(), too; only with make_sums.
  void begin(bool measures = false);

  // With make_sums: the sums of a bucket; empty if nothing was reduced since clear().
  const std::vector<at::Tensor>& sums(size_t bucket) const;
  void widen_sums(size_t bucket);  // converts 16-bit sums to fp32, until clear()
  // The 2-norm of each of sums(bucket), in fp64, computed while backward runs; empty if not computed.
  const std::vector<at::Tensor>& norms(size_t bucket) const { return buckets_[bucket].norms; }

  // With make_sums: how many gradients ranks had since clear(), by slot.
  const std::vector<double>& used(size_t bucket) const { return buckets_[bucket].used; }
  void set_used(size_t bucket, size_t slot, bool used) { buckets_[bucket].used[slot] = used ? 1.0 : 0.0; }
  void clear();

  // Releases the memory of sums(bucket) to the caller. The next sums are kept in memory from give_back(), or in new
  // memory.
  std::vector<at::Tensor> take_sums(size_t bucket);
  void give_back(size_t bucket, std::vector<at::Tensor> sums);

  // Sends the remaining buckets and waits for all. `extra`, up to kMaxExtra whole numbers, is summed over ranks in
  // place, in the message that says which parameters were used. Throws DistributedError; SetupError for a sparse
  // gradient.
  void finish(std::vector<double>& extra);
  static constexpr size_t kMaxExtra = 8;

  // The bytes that the pool grows to if gradients come in the order of buckets. `bucket_bytes` are the sizes of the
  // buckets that take memory from the pool.
  static int64_t pool_bytes(const std::vector<int64_t>& bucket_bytes);

 private:
  static constexpr size_t kPooledBuckets = 2;

  struct Bucket {
    at::Tensor gradients{};       // laid out as the parameters' bucket; made for the first reduction, or from the pool
    std::vector<bool> is_full{};  // by slot
    std::vector<bool> is_trainable{};  // by slot, when this backward began
    size_t num_trainable = 0;
    size_t num_missing = 0;  // trainable parameters whose gradients have not come
    bool launched = false;
    Work work{};
    std::vector<at::Tensor> memory{};  // for sums, from make_sums
    std::vector<at::Tensor> spare{};   // from give_back()
    bool is_of_pool = false;           // `gradients` has memory of the pool
    bool is_in_sums = false;           // `gradients` has the memory of `sums`
    bool is_added_to = false;          // `gradients` holds earlier micro-batches; add to them
    bool goes_into_sums = false;       // reduce_scatter writes from `gradients` into `sums`
    std::vector<at::Tensor> sums{};    // `memory`, or fp32 tensors once 16-bit sums were added up
    bool has_sums = false;
    std::vector<at::Tensor> arrived{};  // by slot: gradients that the keeper will copy into the bucket
    std::shared_future<void> kept{};    // ready when the keeper is done with the bucket
    std::vector<at::Tensor> norms{};    // 2-norm of each of `sums`
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
  bool sends_every_bucket() const;
  void launch_filled();
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
  std::vector<Bucket> buckets_;   // one for each bucket of the parameters
  int64_t message_room_ = 0;      // elements after the last bucket's gradients; 0: messages use the control group
  std::deque<size_t> in_flight_;  // launched buckets whose sums are not kept yet
  std::vector<at::Tensor> pool_;  // free memory, the shortest first
  bool reducing_ = false;
  bool measures_ = false;
  std::vector<size_t> order_;    // buckets in the order of launches
  std::vector<size_t> places_;   // each bucket's place in order_
  size_t next_ = 0;              // place in order_ of the next bucket to launch
  bool learns_order_ = false;    // this rank's order_ does not come from a backward with these trainable parameters
  std::vector<int64_t> filled_;  // buckets, in the order in which this backward filled them
};

}  // namespace fulgur
