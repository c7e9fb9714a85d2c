#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "fulgur/base/logging.h"
#include "fulgur/core/loader.h"
#include "fulgur/loops/evaluation_loop.h"
#include "fulgur/loops/fit_bounds.h"
#include "fulgur/loops/loop_context.h"
#include "fulgur/loops/optimizer_steps.h"
#include "fulgur/loops/train_epoch_loop.h"
#include "fulgur/loops/validation_schedule.h"

namespace fulgur {

// All epochs of fit, each with its validations.
class FitLoop {
 public:
  // Return the checked loaders; called again by reload_dataloaders_every_n_epochs.
  struct LoaderSources {
    std::function<std::shared_ptr<Loader>()> train;
    std::function<LoaderList()> val;
  };

  // Throws SetupError if the options do not fit the loaders.
  FitLoop(LoopContext& context, LoaderSources sources);

  // Estimates the steps of a run that will resume from `state`; called before the optimizers are made, since their
  // schedules may need the number. The arguments and errors are those of load_state().
  void estimate_steps_from(const State& state, int64_t world_size);

  void run(OptimizerSteps& steps);

  // The position of the loop, for a checkpoint at a step boundary; after load_state(), run() resumes from it.
  // `world_size`: number of ranks of the run that saved. `metrics`: the metrics of ended epochs. `of_rank`:
  // rank_state() of this rank; empty if that run had another number of ranks. Throws CheckpointError if max_epochs is
  // already exceeded, or for a count or a time that no run can have.
  State state() const;
  void load_state(const State& state, int64_t world_size, const State& metrics, const State& of_rank);

  // Restores a stop that waits for a minimum bound (FitBounds); called after load_state(), if the callbacks are those
  // of the run that saved, with their options.
  void load_stop(const State& state);

  // The random generators and metrics of this rank; a collective call of all ranks. From load_state() until run()
  // restores them, these are the loaded ones. After an epoch that a bound or a stop cut short, the metrics are what the
  // epoch had collected, and a run that resumes in that epoch completes them.
  State rank_state() const;

 private:
  struct Resume {
    TrainEpochLoop::ResumePoint epoch;
    State metrics;
    State of_rank;
    bool is_in_middle = false;  // a part of the epoch is already consumed
    bool is_restored = false;
  };
  struct Position {
    int64_t epoch = 0, global_step = 0;
    int64_t batches_done = 0;  // in the epoch
  };
  void restore();
  State metrics_to_save() const;
  State stop_state() const;

  void load();
  int64_t log_every_n_steps() const;
  std::optional<int64_t> shortest_of_ranks(std::optional<int64_t> num_batches);
  void write_plan();
  std::optional<int64_t> steps_left(const Position& from);
  void estimate_steps();
  void load_accumulation(const State& state);
  void warn_of_nothing_left() const;
  void send_hyper_parameters();
  void train(OptimizerSteps& steps);
  void run_epoch(OptimizerSteps& steps, FitBounds& bounds);
  void end_epoch(OptimizerSteps& steps);

  LoopContext& context_;
  LoaderSources sources_;
  std::shared_ptr<Loader> train_;
  std::optional<int64_t> num_train_batches_;  // per epoch, limits applied; nullopt: unknown
  bool lockstep_ = false;                     // several ranks, and a train loader without a known length
  int64_t extra_steps_ =
      0;  // steps that the run has beyond those of its epochs, because batches or windows were smaller before
  EvaluationLoop validation_;
  ValidationSchedule schedule_;
  TrainEpochLoop::Progress progress_;
  std::optional<Resume> resume_;               // set by load_state(), until the first epoch has run
  std::optional<State> metrics_of_cut_epoch_;  // nullopt: the last epoch was complete
  FitBounds::Clock::time_point start_ = FitBounds::Clock::now();
  bool restores_stop_ = false;       // load_stop() has found a stop
  std::optional<FitBounds> bounds_;  // nullopt before training
  WarnOnce warn_idle_;               // an epoch without a step
};

}  // namespace fulgur
