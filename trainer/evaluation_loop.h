#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/loader.h"
#include "trainer/loop_context.h"

namespace fulgur {

// The loaders of one evaluation stage, each with how many of its batches are run.
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

// Passes over loaders for validation, also in the middle of fit, or for test: without gradients and in eval mode. The
// train or eval mode of every submodule, and the stage of the run, are afterwards as they were.
class EvaluationLoop {
 public:
  EvaluationLoop(LoopContext& context, Stage stage, EvaluationLoaders loaders = {})
      : context_(context), stage_(stage), loaders_(std::move(loaders)) {}

  void set_loaders(EvaluationLoaders loaders) { loaders_ = std::move(loaders); }
  bool empty() const { return loaders_.empty(); }

  // Of all passes so far: the x of step metrics.
  int64_t num_batches_run() const { return num_batches_run_; }
  void set_num_batches_run(int64_t num_batches) { num_batches_run_ = num_batches; }

  // One pass; the metrics that it logged, reduced.
  Metrics run();

  // The same, but left before a batch for which `ends` is true; then it is false. Metrics, random numbers and the
  // states of callbacks are then as before, as they are if it throws. The hooks of the end are called, too; what those
  // of the epoch's end throw, with too little to look at, is a warning where there is one rank. All ranks ask together,
  // and so never where one of them may have no batch.
  bool run_unless(const std::function<bool()>& ends);

  // A pass over the first batches; metrics and random numbers are afterwards as before.
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

// The same for predict_step; returns its results, one for each batch, loader by loader.
std::vector<Batch> run_prediction(LoopContext& context, const EvaluationLoaders& loaders);

}  // namespace fulgur
