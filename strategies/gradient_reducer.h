#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/collective.h"
#include "strategies/flat_parameters.h"

namespace fulgur {

struct ReduceOptions {
  bool rank_order = false;  // add in the order of ranks: bits do not depend on where buckets end, from 3 ranks on
};

// Sums gradients over ranks, bucket by bucket, while backward still runs. A hook moves a finished gradient into its
// bucket; a full bucket starts its all_reduce, in the order of buckets on every rank, whatever order gradients come in.
//   reducer.begin();                    // from here on finished gradients are on their way
//   loss.backward();
//   reducer.finish(extra);              // waits; the rest of the buckets, and what else the ranks tell each other
// Afterwards a gradient is a view of its bucket, until zero_grad drops it. A parameter that no rank has a gradient for
// has none; one that some have counts as zero on the others.
// Ownership: borrows all three, installs hooks on the parameters until it goes. A hook that a parameter has already is
// called first. Threading: backward's and the training thread, never at once.
// Source: Li et al. 2020, arXiv:2006.15704.
class GradientReducer {
 public:
  GradientReducer(const FlatParameters& parameters, Collective& data, Collective& control, ReduceOptions options = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  void begin();

  // `extra`, fp64, is summed over ranks in place, in the message that says which parameters were used. Throws
  // DistributedError; SetupError for a sparse gradient.
  void finish(std::vector<double>& extra);

 private:
  struct Bucket {
    at::Tensor gradients;       // as the parameters' bucket; made for the first reduction
    std::vector<bool> is_full;  // by slot
    size_t num_full = 0;
    bool launched = false;
    Work work{};
  };
  class Hook;

  void on_gradient(size_t bucket, size_t slot);
  void move_into_bucket(size_t bucket, size_t slot);
  void launch(size_t bucket);
  void fill_up(size_t bucket);
  std::vector<double> exchange_used(std::vector<double>& extra);
  void hand_out(size_t bucket, const double* used);

  const FlatParameters& parameters_;
  Collective& data_;
  Collective& control_;
  ReduceOptions options_;
  std::vector<Bucket> buckets_;  // as those of the parameters
  bool reducing_ = false;
  size_t next_ = 0;  // the bucket that is launched next
};

}  // namespace fulgur
