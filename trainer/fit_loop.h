#pragma once

#include <cstdint>
#include <optional>

#include "core/loader.h"
#include "trainer/loop_context.h"
#include "trainer/train_epoch_loop.h"

namespace fulgur {

// All epochs of fit, each with its validation.
class FitLoop {
 public:
  FitLoop(LoopContext& context, Loader& train, Loader* val);  // val: null if there is none
  void run();

 private:
  bool done() const;
  void run_epoch();
  void end_epoch();
  bool validation_due() const;

  LoopContext& context_;
  TrainEpochLoop train_epoch_;
  Loader* val_;
  std::optional<int64_t> num_train_batches_;
};

}  // namespace fulgur
