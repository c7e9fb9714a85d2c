#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "fulgur/core/callback.h"

namespace fulgur::testing {

// A callback that does one thing at the end of each training batch.
class AtBatchEnd final : public Callback {
 public:
  explicit AtBatchEnd(std::function<void(TrainerControl&)> action) : action_(std::move(action)) {}
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) override {
    action_(trainer);
  }

 private:
  std::function<void(TrainerControl&)> action_;
};

inline std::shared_ptr<Callback> at_batch_end(std::function<void(TrainerControl&)> action) {
  return std::make_shared<AtBatchEnd>(std::move(action));
}

// Requests a stop at the end of every batch of fit from batch `num_batches` on, counted from 1.
inline std::shared_ptr<Callback> stop_at_batch(int64_t num_batches) {
  return at_batch_end([num_batches, count = int64_t{0}](TrainerControl& trainer) mutable {
    if (++count >= num_batches) trainer.request_stop("the test wants it");
  });
}

}  // namespace fulgur::testing
