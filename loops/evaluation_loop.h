#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/core/loader.h"
#include "fulgur/loops/loop_context.h"

namespace fulgur {

// The loaders of one evaluation stage, each with the number of its batches to run.
class EvaluationLoaders {
 public:
  EvaluationLoaders() = default;
  // `option` names the limit. Throws SetupError as BatchLimit::of does.
  EvaluationLoaders(LoaderList loaders, const BatchLimit& limit, std::string_view option);

  bool empty() const;  // there is nothing to run
  size_t size() const { return loaders_.size(); }
  Loader& loader(size_t i) const { return *loaders_[i]; }
  std::optional<int64_t> num_batches(size_t i) const { return limits_[i]; }

  EvaluationLoaders at_most(int64_t num_batches) const;

 private:
  LoaderList loaders_;
  std::vector<std::optional<int64_t>> limits_;
};

// Passes over loaders for validation, also in the middle of fit, or for test: without gradients and in eval mode.
// Afterwards the train or eval mode of every submodule and the stage of the run are restored.
class EvaluationLoop {
 public:
  EvaluationLoop(LoopContext& context, Stage stage, EvaluationLoaders loaders = {})
      : context_(context), stage_(stage), loaders_(std::move(loaders)) {}

  void set_loaders(EvaluationLoaders loaders) { loaders_ = std::move(loaders); }
  bool empty() const { return loaders_.empty(); }

  // The batches of all passes so far: the x axis of step metrics.
  int64_t num_batches_run() const { return num_batches_run_; }
  void set_num_batches_run(int64_t num_batches) { num_batches_run_ = num_batches; }

  // Runs one pass and returns the reduced metrics that it logged.
  Metrics run();

  // Like run(), but stops before a batch if `ends` returns true, and then returns false. Metrics, random numbers and
  // callback states are then restored, as they are if the pass throws. The end hooks still run; in a single process an
  // exception of an epoch-end hook, which may have seen too little data, is only a warning. All ranks call `ends`
  // before the same batches, and never where a rank may have no batch.
  bool run_unless(const std::function<bool()>& ends);

  // Runs a pass over the first `num_steps` batches of each loader (-1: all), then restores metrics and random numbers.
  void run_sanity_check(int64_t num_steps);

 private:
  std::optional<Metrics> run(const EvaluationLoaders& loaders, const std::function<bool()>& ends);
  std::vector<double> batches_of_every_rank(const EvaluationLoaders& loaders) const;
  void leave();
  void send(const Metrics& metrics, int64_t step);

  LoopContext& context_;
  Stage stage_;
  EvaluationLoaders loaders_;
  int64_t num_batches_run_ = 0;
};

// Runs one pass of predict_step; returns its results, one for each batch, loader by loader.
std::vector<Batch> run_prediction(LoopContext& context, const EvaluationLoaders& loaders);

}  // namespace fulgur
