#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "core/loader.h"
#include "core/ranks.h"

namespace fulgur {

// The first batches of one epoch of a loader, at most `limit`. Looks one batch ahead, so that the last one is known as
// such, also of a loader that does not know its length. With `together` all ranks have as many: where one ends, all do.
class LimitedBatches {
 public:
  // Of an epoch that was begun before: what is behind it.
  struct Behind {
    int64_t batches = 0;
    int64_t samples = 0;  // of this rank
  };

  LimitedBatches(Loader& loader, int64_t epoch, std::optional<int64_t> limit, Ranks* together, const Behind& behind)
      : loader_(loader), left_(limit), together_(together) {
    loader.begin_epoch(epoch);
    if (behind.samples > 0) loader.skip(behind.samples);
    if (left_) *left_ -= behind.batches;
    fetch();
  }
  LimitedBatches(Loader& loader, int64_t epoch, std::optional<int64_t> limit)
      : LimitedBatches(loader, epoch, limit, nullptr, {}) {}

  bool empty() const { return !next_; }

  // Only if it is not empty.
  Batch take() {
    Batch batch = *std::exchange(next_, std::nullopt);
    fetch();
    return batch;
  }

 private:
  void fetch() {
    if (left_ && (*left_)-- <= 0) return;
    next_ = loader_.next();
    if (together_ != nullptr && any_rank(*together_, !next_)) next_.reset();
  }

  Loader& loader_;
  std::optional<int64_t> left_;
  Ranks* together_;
  std::optional<Batch> next_;
};

}  // namespace fulgur
