#include "fulgur/trainer/tuner.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <string_view>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

void check(const LearningRateFinderOptions& options) {
  check_fields("find_learning_rate", options);
  if (options.min_lr <= 0.0 || options.min_lr >= options.max_lr) {
    throw UsageError(fmt::format("find_learning_rate: 0 < min_lr < max_lr must hold; got {} and {}", options.min_lr,
                                 options.max_lr));
  }
}

void check(const BatchSizeFinderOptions& options) {
  check_fields("find_batch_size", options);
  if (options.init_size > options.max_size) {
    throw UsageError(fmt::format("find_batch_size: init_size must be at most max_size; got {} and {}",
                                 options.init_size, options.max_size));
  }
}

// Sets the learning rate of every step and keeps the losses.
class LearningRateSweep final : public Callback {
 public:
  explicit LearningRateSweep(const LearningRateFinderOptions& options) : options_(options) {}

  void on_before_optimizer_step(TrainerControl& trainer, Optimizer& optimizer) override {
    const auto step = static_cast<double>(trainer.state().global_step);
    const double part = step / static_cast<double>(options_.num_steps - 1);
    lr_ = canonical_name(options_.mode) == "linear"
              ? options_.min_lr + part * (options_.max_lr - options_.min_lr)
              : options_.min_lr * std::pow(options_.max_lr / options_.min_lr, part);
    for (Optimizer::Group& group : optimizer.groups()) group.lr = lr_;
    is_end_of_window_ = true;
  }

  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch&, int64_t) override {
    if (loss.defined()) {
      window_loss_ += loss.item<double>();
      ++window_batches_;
    }
    if (!std::exchange(is_end_of_window_, false) || window_batches_ == 0) return;
    const double mean = std::exchange(window_loss_, 0.0) / static_cast<double>(std::exchange(window_batches_, 0));
    const int64_t global_step = trainer.state().global_step;
    if (global_step == std::exchange(num_steps_seen_, global_step)) return look_at_skipped(trainer, mean);
    num_lost_ = 0;
    add_step(mean);
    const double smoothed = curve_.losses.back();
    best_ = std::min(best_, smoothed);
    const double limit = best_ + (options_.early_stop_threshold - 1.0) * std::abs(best_);
    if (!std::isfinite(smoothed) || smoothed > limit) {
      trainer.request_stop(fmt::format("the loss diverges at a learning rate of {:.3g}", lr_));
    }
  }

  LearningRateCurve take_curve() { return std::move(curve_); }

 private:
  // A loss scale skips a step now and then; but a loss that stays NaN makes it skip all of them.
  void look_at_skipped(TrainerControl& trainer, double loss) {
    constexpr int64_t kMostLost = 5;
    num_lost_ = std::isfinite(loss) ? 0 : num_lost_ + 1;
    if (num_lost_ < kMostLost) return;
    trainer.request_stop(
        fmt::format("the loss is {} in {} steps from a learning rate of {:.3g}", loss, num_lost_, lr_));
  }

  void add_step(double loss) {
    constexpr double kKeep = 0.98;
    average_ = kKeep * average_ + (1.0 - kKeep) * loss;
    curve_.lrs.push_back(lr_);
    curve_.losses.push_back(average_ / (1.0 - std::pow(kKeep, static_cast<double>(curve_.lrs.size()))));
  }

  const LearningRateFinderOptions options_;
  LearningRateCurve curve_;
  double lr_ = 0.0;
  double average_ = 0.0;
  double best_ = std::numeric_limits<double>::infinity();
  double window_loss_ = 0.0;
  int64_t window_batches_ = 0;
  int64_t num_steps_seen_ = 0;
  bool is_end_of_window_ = false;
  int64_t num_lost_ = 0;  // steps in a row that were skipped, with a loss that is not finite
};

// The central difference between steps, one-sided at the ends: numpy.gradient without coordinates.
double slope_at(const std::vector<double>& values, size_t i) {
  const size_t before = i == 0 ? 0 : i - 1;
  const size_t after = std::min(i + 1, values.size() - 1);
  return (values[after] - values[before]) / static_cast<double>(after - before);
}

// libtorch's CPU allocator throws a plain c10::Error.
bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         std::string_view(error.what()).find("DefaultCPUAllocator: can't allocate memory") != std::string_view::npos;
}

bool fits(const std::function<void(int64_t)>& trial, int64_t size) {
  try {
    trial(size);
    return true;
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) throw;
    log_info("find_batch_size: {} samples do not fit", size);
    return false;
  }
}

}  // namespace

std::optional<double> LearningRateCurve::suggestion(size_t skip_begin, size_t skip_end) const {
  std::vector<double> kept_lrs, kept_losses;
  for (size_t i = skip_begin; i + skip_end < lrs.size(); ++i) {
    if (!std::isfinite(losses[i])) continue;
    kept_lrs.push_back(lrs[i]);
    kept_losses.push_back(losses[i]);
  }
  if (kept_lrs.size() < 2) return std::nullopt;
  size_t steepest = 0;
  for (size_t i = 1; i < kept_lrs.size(); ++i) {
    if (slope_at(kept_losses, i) < slope_at(kept_losses, steepest)) steepest = i;
  }
  return kept_lrs[steepest];
}

void LearningRateFinderOptions::describe(FieldVisitor& visit) {
  visit({.name = "min_lr", .help = "the first learning rate"}, &min_lr);
  visit({.name = "max_lr", .help = "the last learning rate"}, &max_lr);
  visit({.name = "num_steps", .help = "optimizer steps, each with a learning rate of its own", .min = 2}, &num_steps);
  visit({.name = "mode", .help = "how the rates are spaced", .choices = {"exponential", "linear"}}, &mode);
  visit({.name = "early_stop_threshold",
         .help = "stop when the smoothed loss exceeds its minimum b by (early_stop_threshold - 1) * |b|",
         .min = 1},
        &early_stop_threshold);
}

void BatchSizeFinderOptions::describe(FieldVisitor& visit) {
  visit({.name = "mode", .help = "how sizes are tried", .choices = {"power", "binsearch"}}, &mode);
  visit({.name = "init_size", .help = "samples in the first trial's batches", .min = 1}, &init_size);
  visit({.name = "max_size", .help = "samples in the largest batches", .min = 1}, &max_size);
  visit({.name = "steps_per_trial", .help = "optimizer steps of a trial", .min = 1}, &steps_per_trial);
  visit({.name = "margin", .help = "part of its result that binsearch subtracts", .min = 0, .max = 1}, &margin);
}

LearningRateCurve sweep_learning_rate(const LearningRateFinderOptions& options, const Trial& trial) {
  check(options);
  const auto sweep = std::make_shared<LearningRateSweep>(options);
  trial(sweep, options.num_steps);
  return sweep->take_curve();
}

int64_t search_batch_size(const BatchSizeFinderOptions& options, const std::function<void(int64_t size)>& trial,
                          const std::function<bool(int64_t size)>& is_whole_epoch) {
  check(options);
  int64_t size = options.init_size;
  trial(size);  // throws if even the first size does not fit
  int64_t too_large = options.max_size + 1;
  while (size < options.max_size && !is_whole_epoch(size)) {
    const int64_t larger = std::min(2 * size, options.max_size);
    if (!fits(trial, larger)) {
      too_large = larger;
      break;
    }
    size = larger;
  }
  if (too_large > options.max_size) {
    log_info("find_batch_size: memory was not the limit; a batch of {} is {}", size,
             size < options.max_size ? "a whole epoch" : "the largest that was to be tried (max_size)");
  }
  if (canonical_name(options.mode) == "power" || too_large > options.max_size) return size;
  while (too_large - size > 1) {
    const int64_t middle = size + (too_large - size) / 2;
    (fits(trial, middle) ? size : too_large) = middle;
  }
  return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(size) * (1.0 - options.margin)));
}

}  // namespace fulgur
