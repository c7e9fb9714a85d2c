#pragma once

#include "core/batch.h"
#include "core/loader.h"
#include "trainer/loop_context.h"

namespace fulgur {

// The batches of one training epoch.
class TrainEpochLoop {
 public:
  TrainEpochLoop(LoopContext& context, Loader& loader) : context_(context), loader_(loader) {}

  // Ends with the loader, with max_steps, or with the batch in which a stop was requested.
  void run();

  bool max_steps_reached() const;

 private:
  void run_batch(const Batch& batch);
  void optimize(const Batch& batch, const at::Tensor& loss);
  void log_step_metrics();

  LoopContext& context_;
  Loader& loader_;
};

}  // namespace fulgur
