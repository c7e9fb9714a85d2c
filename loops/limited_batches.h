#pragma once

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/state.h"
#include "fulgur/core/loader.h"
#include "fulgur/core/ranks.h"

namespace fulgur {

// The first batches of one epoch of a loader, at most `limit`. After each take(), empty() says whether that batch was
// the last. A batch is fetched when it is taken, so that the loader's random generators are in the same state as in a
// run that resumes from a checkpoint. One batch is prefetched if the loader does not know its length, or if the epoch
// was begun with another batch size or number of ranks than the run that resumes it. With `lockstep` all ranks get the
// same number of batches: all end when the first one ends.
class LimitedBatches {
 public:
  // The part of a resumed epoch that is already consumed.
  struct Consumed {
    int64_t batches = 0;    // number of batches that this rank has consumed
    State position{};       // where the loader resumes; empty: it has no position, and reads `batches` batches again
    bool is_recut = false;  // the epoch began with other batches, so that fewer may be left than num_batches() says
  };

  LimitedBatches(Loader& loader, int64_t epoch, std::optional<int64_t> limit, Ranks* lockstep, const Consumed& consumed)
      : loader_(loader),
        limit_(limit),
        left_(limit),
        prefetches_(lockstep != nullptr || !limit || !loader.num_batches() || consumed.is_recut),
        lockstep_(lockstep) {
    loader.begin_epoch(epoch);
    go_to(consumed);
    if (left_) *left_ -= consumed.batches;
    if (prefetches_) fetch();
  }
  LimitedBatches(Loader& loader, int64_t epoch, std::optional<int64_t> limit)
      : LimitedBatches(loader, epoch, limit, nullptr, {}) {}

  bool empty() const { return prefetches_ ? !next_ : *left_ <= 0; }

  // Requires !empty(). Throws SetupError if the loader has fewer batches than it promised.
  Batch take() {
    if (!prefetches_) fetch();
    if (!next_) {
      const int64_t given = *limit_ - (*left_ + 1);
      throw SetupError(c10::str("the loader promised ", loader_.num_batches().value_or(*limit_),
                                " batches (num_batches()) and gave ", given,
                                "; can it be read only once? If the number is not known, return std::nullopt"));
    }
    Batch batch = *std::exchange(next_, std::nullopt);
    if (prefetches_) fetch();
    return batch;
  }

  // The loader's position after the last batch that was taken.
  State position() const { return prefetches_ ? position_ : loader_.position(); }

 private:
  void go_to(const Consumed& consumed) {
    if (!consumed.position.empty() && !loader_.position().empty()) {
      loader_.go_to(consumed.position);
    } else {
      for (int64_t i = 0; i < consumed.batches && loader_.next(); ++i) {
      }
    }
  }

  void fetch() {
    if (prefetches_) position_ = loader_.position();
    if (left_ && (*left_)-- <= 0) return;
    next_ = loader_.next();
    if (lockstep_ != nullptr && any_rank(*lockstep_, !next_)) next_.reset();
  }

  Loader& loader_;
  const std::optional<int64_t> limit_;
  std::optional<int64_t> left_;
  const bool prefetches_;
  Ranks* lockstep_;
  std::optional<Batch> next_;
  State position_{};  // where next_ begins, if it is fetched ahead
};

}  // namespace fulgur
