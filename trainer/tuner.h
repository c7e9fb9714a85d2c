#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

// The learning rates that Trainer::find_learning_rate tries, and when it stops.
struct LearningRateFinderOptions {
  double min_lr = 1e-8;
  double max_lr = 1.0;
  int64_t num_steps = 100;            // optimizer steps, each with a learning rate of its own
  std::string mode = "exponential";   // how the rates are spaced: exponential or linear
  double early_stop_threshold = 4.0;  // stop when the smoothed loss exceeds its least so far, b, by more than
                                      // (early_stop_threshold - 1) * |b|: for b > 0 at that multiple of b; inf: never

  void describe(FieldVisitor& visit);
};

// What a learning-rate sweep saw, step by step.
struct LearningRateCurve {
  std::vector<double> lrs;
  std::vector<double> losses;  // smoothed: an exponential moving average with factor 0.98, without its bias

  // Where the loss falls fastest from step to step, leaving out the first `skip_begin` and the last `skip_end` steps
  // and losses that are not finite; nullopt if fewer than two steps are left. (L. Smith, Cyclical Learning Rates, 2015.
  // Lightning 2.6 takes the slope by the learning rate instead, which favours small ones in an exponential sweep.)
  std::optional<double> suggestion(size_t skip_begin = 10, size_t skip_end = 1) const;
};

// The batch sizes that Trainer::find_batch_size tries.
struct BatchSizeFinderOptions {
  std::string mode = "power";  // power: double it until memory runs out; binsearch: then search between the last two
  int64_t init_size = 2;       // samples in the first trial's batches
  int64_t max_size = 8192;
  int64_t steps_per_trial = 3;  // optimizer steps
  double margin = 0.05;         // part of its result that binsearch subtracts, since memory use varies

  void describe(FieldVisitor& visit);
};

// Runs fit for `num_steps` optimizer steps with `callback`, and then restores everything.
using Trial = std::function<void(std::shared_ptr<Callback> callback, int64_t num_steps)>;

// Throws UsageError if an option cannot be used.
LearningRateCurve sweep_learning_rate(const LearningRateFinderOptions& options, const Trial& trial);

// `trial` runs with batches of a size, and throws if memory runs out. `is_whole_epoch` returns true if a larger batch
// would hold no more samples. Throws UsageError if an option cannot be used, and what the first trial throws.
int64_t search_batch_size(const BatchSizeFinderOptions& options, const std::function<void(int64_t size)>& trial,
                          const std::function<bool(int64_t size)>& is_whole_epoch);

}  // namespace fulgur
