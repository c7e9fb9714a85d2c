#pragma once

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/loader.h"
#include "core/ranks.h"

namespace fulgur {

// The first batches of one epoch of a loader, at most `limit`, of which the last is known as such. A batch is fetched
// when it is taken, so that a random generator that the loader draws from stands where it would in a run that goes on
// from a checkpoint; of a loader that does not know its length, or was left between two batches, one is fetched ahead.
// With `together` all ranks have as many: where one ends, all do.
class LimitedBatches {
 public:
  // Of an epoch that was begun before: what is behind it.
  struct Behind {
    int64_t batches = 0;
    int64_t samples = 0;  // of this rank
  };

  LimitedBatches(Loader& loader, int64_t epoch, std::optional<int64_t> limit, Ranks* together, const Behind& behind)
      : loader_(loader),
        limit_(limit),
        left_(limit),
        looks_ahead_(together != nullptr || !limit || !loader.num_batches() ||
                     behind.samples != behind.batches * loader.batch_size()),
        together_(together) {
    loader.begin_epoch(epoch);
    if (behind.samples > 0) loader.skip(behind.samples);
    if (left_) *left_ -= behind.batches;
    if (looks_ahead_) fetch();
  }
  LimitedBatches(Loader& loader, int64_t epoch, std::optional<int64_t> limit)
      : LimitedBatches(loader, epoch, limit, nullptr, {}) {}

  bool empty() const { return looks_ahead_ ? !next_ : *left_ <= 0; }

  // Only if it is not empty. Throws SetupError if the loader has fewer batches than it promised.
  Batch take() {
    if (!looks_ahead_) fetch();
    if (!next_) {
      const int64_t given = *limit_ - (*left_ + 1);
      throw SetupError(c10::str("the loader promised ", loader_.num_batches().value_or(*limit_),
                                " batches (num_batches()) and gave ", given,
                                "; can it be read only once? If the number is not known, return std::nullopt"));
    }
    Batch batch = *std::exchange(next_, std::nullopt);
    if (looks_ahead_) fetch();
    return batch;
  }

 private:
  void fetch() {
    if (left_ && (*left_)-- <= 0) return;
    next_ = loader_.next();
    if (together_ != nullptr && any_rank(*together_, !next_)) next_.reset();
  }

  Loader& loader_;
  const std::optional<int64_t> limit_;
  std::optional<int64_t> left_;
  const bool looks_ahead_;
  Ranks* together_;
  std::optional<Batch> next_;
};

}  // namespace fulgur
