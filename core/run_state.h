#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fulgur/core/step_report.h"

namespace fulgur {

enum class EntryPoint { fit, validate, test, predict };  // which Trainer method runs
enum class Stage { train, validate, test, predict };     // which of its loops runs now: fit trains and validates

constexpr std::string_view to_string(EntryPoint entry_point) {
  constexpr std::string_view kNames[] = {"fit", "validate", "test", "predict"};
  return kNames[static_cast<int>(entry_point)];
}
constexpr std::string_view to_string(Stage stage) {
  constexpr std::string_view kNames[] = {"train", "validate", "test", "predict"};
  return kNames[static_cast<int>(stage)];
}

// The progress of a run. Written by the loops, read by all others.
struct RunState {
  EntryPoint entry_point = EntryPoint::fit;
  Stage stage = Stage::train;
  bool sanity_checking = false;      // the few validation batches before training
  bool is_dry_run = false;           // a few steps of a longer training: fast_dev_run, or a trial of the tuner
  int64_t epoch = 0;                 // 0-based; the running epoch, or between epochs the number completed
  int64_t global_step = 0;           // optimizer steps completed
  int64_t batch_idx = 0;             // within the epoch of the running stage
  int64_t dataloader_idx = 0;        // 0-based, of the evaluation loaders
  int64_t batches_that_stepped = 0;  // training batches that ended in an optimizer step (in manual optimisation: all
                                     // training batches): the x axis of metrics
  bool is_last_batch = false;        // the running batch is the last of the training epoch

  // For on_train_epoch_end: true if the epoch has run to its end, or its rest was skipped, so that a run that resumes
  // begins with the next epoch; false if a bound of fit, or a requested stop, has cut it short, so that such a run
  // resumes within it.
  bool epoch_is_complete = false;

  std::optional<int64_t> num_batches{};  // per epoch of the running stage, limits applied; nullopt: unknown
  int64_t max_epochs = -1;               // as set; -1: unbounded
  std::optional<int64_t> batch_size{};   // samples in a training batch of one rank; nullopt: its loader does not know
  bool has_validation = false;           // fit has validation batches
  bool has_validated = false;            // a validation of fit is complete, in this process or before the checkpoint
  double data_wait_s = 0.0;              // seconds that training has waited for its loader, in this process
  StepReport step_report{};              // the outcome of the last optimizer step

  // Optimizer steps that fit will take: ceil(batches / accumulate_grad_batches) * max_epochs, at most max_steps. Unset
  // if nothing bounds the steps, or if the loader's length is not known and max_steps is unset. Uses the Trainer's
  // accumulate_grad_batches; a GradientAccumulationScheduler makes the steps fewer. A dry run has the steps of the
  // whole training. A run that resumes with another batch size or number of ranks has the steps so far and those left.
  std::optional<int64_t> estimated_stepping_batches{};

  // The x axis of an epoch's metrics: the last training batch that ended in an optimizer step.
  int64_t last_step() const { return batches_that_stepped > 0 ? batches_that_stepped - 1 : 0; }
};

}  // namespace fulgur
