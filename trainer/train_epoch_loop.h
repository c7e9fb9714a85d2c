#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "core/batch.h"
#include "core/loader.h"
#include "trainer/evaluation_loop.h"
#include "trainer/fit_bounds.h"
#include "trainer/limited_batches.h"
#include "trainer/loop_context.h"
#include "trainer/optimizer_steps.h"
#include "trainer/validation_schedule.h"

namespace fulgur {

// The batches of one training epoch, with the validations that fall among them.
//   A window is the micro-batches of one optimizer step: accumulate_grad_batches of them, fewer at the end of the
//   epoch. The loop ends only between windows, so that no gradient is lost.
class TrainEpochLoop {
 public:
  // Which batches the weights have seen.
  struct Progress {
    int64_t epoch = 0;
    int64_t of_epoch = 0;            // how many
    int64_t odd_samples = 0;         // beside them, of a run on other ranks
    int64_t total = 0;               // of all epochs
    bool epoch_is_complete = false;  // it did not end by a bound of fit
    struct Validation {
      bool after_step;     // the batch before it ended in an optimizer step
      bool is_last_batch;  // of the epoch
    };
    std::optional<Validation> due{};  // it has not come to its end
  };
  // An epoch that was begun in another process.
  struct Resumed {
    LimitedBatches::Behind behind;
    std::function<void()> restore;  // what changes with every batch: metrics, random generators
  };

  // All are borrowed. `validation` may be empty.
  TrainEpochLoop(LoopContext& context, OptimizerSteps& steps, FitBounds& bounds, EvaluationLoop& validation,
                 ValidationSchedule& validation_schedule, Progress& progress)
      : context_(context),
        steps_(steps),
        bounds_(bounds),
        validation_(validation),
        schedule_(validation_schedule),
        progress_(progress) {}

  // `limit`: batches at most. `together`: of a loader that does not know its length, all ranks run as many. Ends with
  // the loader, with a bound of fit, or when on_train_batch_start says so. `resumed`: null for an epoch from its start.
  void run(Loader& loader, std::optional<int64_t> limit, bool together, const Resumed* resumed);

 private:
  bool ends_here();
  void at_boundary();
  void run_batch(const Batch& batch);
  at::Tensor run_automatic(const Batch& batch);
  at::Tensor run_micro_batch(const Batch& batch, bool is_last);
  at::Tensor run_closure(const Batch& batch);
  at::Tensor run_manual(const Batch& batch);
  at::Tensor training_step(const Batch& batch);
  void end_micro_batch(bool is_last, bool ends_epoch);
  void count_step();
  void log_step_metrics();
  void drain_if_last();
  bool validation_is_due();
  void validate_after_batch(bool is_due);
  void go_on(const Resumed& resumed);
  bool validate();

  LoopContext& context_;
  OptimizerSteps& steps_;
  FitBounds& bounds_;
  EvaluationLoop& validation_;
  ValidationSchedule& schedule_;
  Progress& progress_;

  int64_t accumulate_grad_batches_ = 1;  // in this epoch
  int64_t window_batches_ = 0;           // of the running window
  int64_t micro_batches_ = 0;            // those of them that had a loss
  bool ended_ = false;                   // a rank has no further batch
  bool stepped_ = false;                 // the last batch ended in an optimizer step
};

}  // namespace fulgur
