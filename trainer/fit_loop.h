#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "core/loader.h"
#include "trainer/evaluation_loop.h"
#include "trainer/fit_bounds.h"
#include "trainer/loop_context.h"
#include "trainer/optimizer_steps.h"
#include "trainer/train_epoch_loop.h"
#include "trainer/validation_schedule.h"

namespace fulgur {

// All epochs of fit, each with its validations.
class FitLoop {
 public:
  // Give the loaders, checked; asked again by reload_dataloaders_every_n_epochs.
  struct LoaderSources {
    std::function<std::shared_ptr<Loader>()> train;
    std::function<LoaderList()> val;
  };

  // Throws SetupError if the options do not fit the loaders.
  FitLoop(LoopContext& context, LoaderSources sources);

  void run(OptimizerSteps& steps);

  // Where it stands, for a checkpoint between two steps; and to go on from there when it runs. `metrics`: those of
  // ended epochs. `of_rank`: all that this rank kept; empty if the ranks were others. Throws CheckpointError if
  // max_epochs is behind already, or for a count or a time that no run can have.
  State state() const;
  void load_state(const State& state, const State& metrics, const State& of_rank);

  // Random numbers and metrics of this rank; those that were loaded, until the run has begun to go on. After an epoch
  // that a bound or a stop has cut, the metrics are what the epoch had collected: a run that resumes in it completes
  // them.
  State rank_state() const;

 private:
  struct Resume {
    TrainEpochLoop::Resumed epoch;
    State metrics;
    State of_rank;
    bool is_restored = false;
  };
  void restore();

  void load();
  std::optional<int64_t> shortest_of_ranks(std::optional<int64_t> num_batches);
  void write_plan();
  void train(OptimizerSteps& steps);
  void run_epoch(OptimizerSteps& steps, FitBounds& bounds);
  void end_epoch(OptimizerSteps& steps);

  LoopContext& context_;
  LoaderSources sources_;
  std::shared_ptr<Loader> train_;
  std::optional<int64_t> num_train_batches_;  // of an epoch, limits applied; nullopt: unknown
  bool together_ = false;                     // it is unknown, and there are several ranks
  EvaluationLoop validation_;
  ValidationSchedule schedule_;
  TrainEpochLoop::Progress progress_;
  std::optional<Resume> resume_;               // until the first epoch has begun
  std::optional<State> metrics_of_cut_epoch_;  // what the last epoch collected, if it was cut
  FitBounds::Clock::time_point start_ = FitBounds::Clock::now();
  bool told_idle_ = false;  // of an epoch without a step
};

}  // namespace fulgur
