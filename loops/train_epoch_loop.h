#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "fulgur/core/batch.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/loader.h"
#include "fulgur/loops/evaluation_loop.h"
#include "fulgur/loops/fit_bounds.h"
#include "fulgur/loops/limited_batches.h"
#include "fulgur/loops/loop_context.h"
#include "fulgur/loops/optimizer_steps.h"
#include "fulgur/loops/validation_schedule.h"

namespace fulgur {

// Runs the batches of one training epoch, and the validations between its steps.
//   An accumulation window is the micro-batches of one optimizer step: accumulate_grad_batches of them, fewer at the
//   end of the epoch. The loop ends only at step boundaries, which are between two windows, so that no gradient is
//   discarded.
class TrainEpochLoop {
 public:
  // Which batches the weights have seen.
  struct Progress {
    int64_t epoch = 0;
    int64_t batches_done = 0;   // batches of the epoch on this rank, up to the last step boundary
    State position{};           // the loader's position after batches_done
    bool is_recut = false;      // the epoch was resumed with other ranks or batches
    bool had_last = false;      // the last batch of the epoch is among batches_done
    int64_t total_batches = 0;  // micro-batches of all epochs
    int64_t accumulation = 0;   // micro-batches of a step in this epoch; 0: none has begun
    struct Validation {
      bool after_step;     // the batch before the validation ended in an optimizer step
      bool is_last_batch;  // the batch before the validation is the last of the epoch
    };
    std::optional<Validation> interrupted_validation{};  // due, but not complete
  };
  // An epoch that another process began.
  struct ResumePoint {
    LimitedBatches::Consumed consumed;
    bool had_last;                        // the last batch of the epoch is among the consumed
    std::optional<int64_t> accumulation;  // micro-batches of a step when the epoch began; nullopt: those of this run
    std::function<void()> restore;        // restores what every batch changes: metrics, random generators
  };

  // All references are borrowed. `validation` may be empty.
  TrainEpochLoop(LoopContext& context, OptimizerSteps& steps, FitBounds& bounds, EvaluationLoop& validation,
                 ValidationSchedule& validation_schedule, Progress& progress)
      : context_(context),
        steps_(steps),
        bounds_(bounds),
        validation_(validation),
        schedule_(validation_schedule),
        progress_(progress) {}

  // `limit`: the most batches to run. `lockstep`: all ranks run the same number of batches of a loader that does not
  // know its length. Ends with the loader, at a bound of fit, or when on_train_batch_start returns skip_epoch.
  // `resumed`: null for an epoch from its start.
  void run(Loader& loader, std::optional<int64_t> limit, bool lockstep, const ResumePoint* resumed);

 private:
  enum class EndsEpoch { no, without_further_batch, by_skipping };

  void begin(const LimitedBatches::Consumed& consumed, std::optional<int64_t> accumulation);
  LimitedBatches open(Loader& loader, std::optional<int64_t> limit, bool lockstep,
                      const LimitedBatches::Consumed& consumed, bool resumes);
  BatchAction run_batches(LimitedBatches& batches);
  void complete_window();
  void end_without_batch(bool validates);
  bool ends_here();
  void at_boundary();
  void run_batch(const Batch& batch, const LimitedBatches& batches);
  at::Tensor run_automatic(const Batch& batch);
  at::Tensor run_micro_batch(const Batch& batch, bool is_last);
  at::Tensor run_closure(const Batch& batch);
  at::Tensor run_manual(const Batch& batch);
  at::Tensor training_step(const Batch& batch);
  void end_micro_batch(bool is_last, EndsEpoch ends);
  void count_step();
  void log_step_metrics();
  void look_at_schedule();
  bool validation_is_due();
  void validate_after_batch(bool is_due);
  bool go_on(const ResumePoint& resumed);
  bool validate();

  LoopContext& context_;
  OptimizerSteps& steps_;
  FitBounds& bounds_;
  EvaluationLoop& validation_;
  ValidationSchedule& schedule_;
  Progress& progress_;

  int64_t accumulate_grad_batches_ = 1;  // in this epoch
  int64_t window_batches_ = 0;           // micro-batches of the accumulation window so far
  int64_t micro_batches_ = 0;            // the part of window_batches_ that had a loss
  double loss_sum_ = 0.0;                // the sum of their losses, if a callback judges updates
  bool ended_ = false;                   // a rank has no further batch
  bool skipped_ = false;                 // because on_train_batch_start returned skip_epoch there
  bool stepped_ = false;                 // the last batch ended in an optimizer step
  bool validation_is_due_ = false;       // at the end of the window
};

}  // namespace fulgur
