#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fulgur/core/loader.h"
#include "fulgur/data/sampler.h"

namespace fulgur {

// How the order of an epoch is cut into the batches of one rank. The order is a sequence of items: of samples, if a
// Sampler chooses them, or of batches, if a BatchSampler does.
struct EpochCut {
  std::shared_ptr<const Sampler> sampler{};             // null: batch_sampler chooses
  std::shared_ptr<const BatchSampler> batch_sampler{};  // null: sampler chooses
  int64_t batch_size = 1;                               // items in a batch; 1 with a batch_sampler
  bool drop_last = false;
  bool infinite = false;  // one pass over the order follows another, without end
  DataShard shard{};
  int64_t num_samples = 0;  // in the dataset; what a sampler chooses is below

  int64_t num_items() const {
    return sampler ? sampler->size() : batch_sampler->size();
  }  // the items of one pass, for all ranks together

  // The number of items that this rank gets of the last `num_items` of a pass.
  int64_t share_of(int64_t num_items) const;
};

// The samples of a batch that is still to be read.
struct PlannedBatch {
  at::Tensor samples{};           // int64, 1-dim
  std::vector<int64_t> epochs{};  // for each sample the epoch that its Random is made for
};

// The samples of each batch of one epoch, on one rank, from a place in the order that all ranks have in common.
class EpochPlan {
 public:
  EpochPlan(const EpochCut& cut, int64_t epoch, int64_t place);

  std::optional<PlannedBatch> next();  // nullopt once the epoch has ended

  // The number of items in the order, of all ranks together, before the next batch.
  int64_t place() const;

  // A hash of the order, of all ranks together, of the pass that has the item at `place`; it depends on neither the
  // rank, the number of ranks nor the batch_size. An order is hashed at the first call for its pass. If another pass is
  // loaded, the sampler is asked for the order once more.
  uint64_t order_hash(int64_t place) const;

 private:
  int64_t pass_of(int64_t place) const;
  int64_t epoch_of(int64_t pass) const;
  std::vector<at::Tensor> order_of(int64_t pass) const;
  void load_pass_of(int64_t place);
  PlannedBatch batch_at(int64_t place, int64_t count);

  const EpochCut cut_;
  const int64_t epoch_;
  const int64_t start_;               // the place at which the plan begins
  const int64_t size_;                // items in a pass
  const int64_t share_;               // items for this rank; not used if the epoch is infinite
  int64_t given_ = 0;                 // items that this rank has got
  int64_t pass_ = -1;                 // the pass whose order is loaded; -1: none
  std::vector<at::Tensor> order_{};   // the pass's samples: one tensor if a Sampler chooses, otherwise the batches
  mutable int64_t hashed_pass_ = -1;  // the pass whose hash is kept; -1: none
  mutable uint64_t hash_ = 0;
};

}  // namespace fulgur
