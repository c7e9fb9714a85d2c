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

  void run(OptimizerSteps& steps);

  // The position of the loop, for a checkpoint at a step boundary; after load_state(), run() resumes from it.
  // `world_size`: number of ranks of the run that saved. `metrics`: the metrics of ended epochs. `of_rank`:
  // rank_state() of this rank; empty if that run had another number of ranks. Throws CheckpointError if max_epochs is
  // already exceeded, or for a count or a time that no run can have.
  State state() const;
  void load_state(const State& state, int64_t world_size, const State& metrics, const State& of_rank);

  // The random generators and metrics of this rank. From load_state() until run() restores them, these are the loaded
  // ones. After an epoch that a bound or a stop cut short, the metrics are what the epoch had collected, and a run that
  // resumes in that epoch completes them.
  State rank_state() const;

 private:
  struct Resume {
    TrainEpochLoop::ResumePoint epoch;
    State metrics;
    State of_rank;
    bool is_in_middle = false;  // a part of the epoch is already consumed
    bool is_restored = false;
  };
  void restore();

  void load();
  std::optional<int64_t> shortest_of_ranks(std::optional<int64_t> num_batches);
  void write_plan();
  void estimate_steps(int64_t batches_done);
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
  EvaluationLoop validation_;
  ValidationSchedule schedule_;
  TrainEpochLoop::Progress progress_;
  std::optional<Resume> resume_;               // set by load_state(), until the first epoch has run
  std::optional<State> metrics_of_cut_epoch_;  // nullopt: the last epoch was complete
  FitBounds::Clock::time_point start_ = FitBounds::Clock::now();
  WarnOnce warn_idle_;  // an epoch without a step
};

}  // namespace fulgur
