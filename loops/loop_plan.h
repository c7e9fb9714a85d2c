#pragma once

#include <cstdint>
#include <optional>

#include "fulgur/core/gradient_clipping.h"
#include "fulgur/loops/batch_limit.h"

namespace fulgur {

inline constexpr int64_t kLogEveryNSteps = 50;  // the default, where an epoch or a run has as many steps

// What the options of a Trainer mean for its loops: defaults are filled in, and what another option turns off is off.
struct LoopPlan {
  // Bounds of fit.
  int64_t max_epochs = -1;  // -1: no bound
  int64_t min_epochs = 0;
  int64_t max_steps = -1;  // optimizer steps; -1: no bound
  int64_t min_steps = 0;
  std::optional<TimeSpan> max_time{};

  // Batches of an epoch.
  BatchLimit limit_train_batches{};
  BatchLimit limit_val_batches{};
  bool overfits = false;  // the same batches in every epoch; overfit_batches has set both limits
  int64_t reload_dataloaders_every_n_epochs = 0;

  // When fit validates.
  ValidationInterval val_check_interval{};
  std::optional<int64_t> check_val_every_n_epoch = 1;
  int64_t num_sanity_val_steps = 0;  // -1: all batches

  // Steps.
  int64_t accumulate_grad_batches = 1;
  GradientClipping clipping{};
  bool detect_anomaly = false;
  bool keeps_lr = false;  // schedules are made, but do not move: the tuner sets learning rates, or needs none

  // How often loggers get the values of a step. 0: never; nullopt: LoopContext has the number.
  std::optional<int64_t> log_every_n_steps{};

  // The optimizer steps of this many batches.
  int64_t steps_in(int64_t num_batches) const {
    return (num_batches + accumulate_grad_batches - 1) / accumulate_grad_batches;
  }

  // What bounds a whole training. -1: no bound.
  struct Bounds {
    int64_t max_epochs = -1;
    int64_t max_steps = -1;
    BatchLimit limit_train_batches{};
  };
  // The training of which this run takes only a few steps, in fast_dev_run or for the tuner; nullopt: this run itself.
  // RunState::estimated_stepping_batches is about that training, so that its schedules can be made.
  std::optional<Bounds> dry_run_of{};
};

}  // namespace fulgur
