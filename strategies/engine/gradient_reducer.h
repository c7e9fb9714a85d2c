#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_buckets.h"
#include "fulgur/strategies/engine/gradient_memory.h"
#include "fulgur/strategies/engine/gradient_sums.h"
#include "fulgur/strategies/engine/gradient_views.h"

namespace fulgur {

// Sums gradients over ranks, bucket by bucket, while backward still runs. A hook moves a finished gradient into its
// bucket; a full bucket starts its all_reduce, in one order of buckets on every rank, whatever order gradients come
// in: at first the order of the parameters' buckets, then the order in which a backward of rank 0 filled them.
//   reducer.begin();                    // from here on, finished gradients are sent
//   loss.backward();
//   reducer.finish(extra);              // sends the remaining buckets and `extra`, and waits for the sums
// With ReduceOptions::make_sums the results are sums(), and parameters have no gradients. Without it a gradient is
// afterwards a view of its bucket, until zero_grad drops it; a parameter that has a gradient on no rank gets none; if
// only some ranks have a gradient, it counts as zero on the others.
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

  // `takes_norms`: finish() leaves the norms of sums, too.
  void begin(bool takes_norms = false);

  // In the scope a backward makes large gradients in the memory of their buckets, which saves copies.
  ScopedGradientMemory open_memory() const { return views_ ? views_->memory().open() : ScopedGradientMemory(); }

  GradientSums& sums() { return *sums_; }  // only with make_sums
  const GradientSums& sums() const { return *sums_; }

  // Sends the remaining buckets and waits for all. `extra`, up to kMaxExtra numbers, is summed over ranks in place, in
  // the message that says which parameters were used; the message may have fp32. Throws DistributedError; SetupError
  // for a sparse gradient.
  void finish(std::vector<double>& extra);
  static constexpr size_t kMaxExtra = 8;

 private:
  struct Bucket {
    std::vector<bool> is_full{};       // by slot
    std::vector<bool> is_trainable{};  // by slot, when this backward began
    size_t num_trainable = 0;
    size_t num_missing = 0;  // trainable parameters whose gradients have not come
    bool is_launched = false;
  };
  class Hook;

  GradientBuckets& contents();
  void on_gradient(size_t bucket, size_t slot);
  void take_gradient(size_t bucket, size_t slot);
  void fill_up(size_t bucket);
  void launch(size_t bucket);
  void launch_filled();
  void launch_rest(size_t num_buckets);
  size_t num_early() const;
  bool message_rides_along() const;
  bool sends_every_bucket() const;
  void learn_order();
  std::vector<bool> used_parameters() const;
  std::vector<double> message_of(const std::vector<double>& extra, const std::vector<bool>& marks) const;
  void add_up(std::vector<double>& numbers);
  std::vector<double> exchange(std::vector<double> message, const std::vector<bool>& marks);
  std::vector<double> exchange_with_last_bucket(std::vector<double> message, const std::vector<bool>& marks);
  void keep_counts(std::span<const double> packed, const std::vector<bool>& marks, int64_t world_size);

  const FlatParameters& parameters_;
  Collective& data_;
  Collective& control_;
  const bool may_learn_order_;
  std::optional<GradientViews> views_;
  std::optional<GradientSums> sums_;  // one of the two
  std::vector<Bucket> buckets_;       // one for each bucket of the parameters
  bool reducing_ = false;
  std::vector<size_t> order_;     // buckets in the order of launches
  std::vector<size_t> places_;    // each bucket's place in order_
  size_t next_ = 0;               // place in order_ of the next bucket to launch
  bool learns_order_ = false;     // this rank's order_ does not come from a backward with these trainable parameters
  std::vector<bool> last_marks_;  // by bucket and slot: the gradients that this rank had at the last exchange of marks
  std::vector<double> used_by_;   // by bucket and slot: the number of ranks that had a gradient then
  bool all_were_used_ = true;     // at the last exchange every bucket was used by some rank
  std::vector<int64_t> filled_;   // buckets, in the order in which this backward filled them
};

}  // namespace fulgur
