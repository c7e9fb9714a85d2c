#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/lr_scheduler.h"

// Learning-rate schedules with the names, options, defaults and values of torch.optim.lr_scheduler:
//
//   return {optim::AdamW(parameters(), {.lr = 3e-4}),
//           {.scheduler = optim::WarmupCosineLR::make({.warmup_steps = 500, .total_steps = 20'000}),
//            .interval = "step"}};
//
// A step of a schedule is what LRSchedulerConfig's interval and frequency say: an epoch, or a step of the optimizer.
// Where torch multiplies the last learning rate by a factor, these schedules are closed forms of the step: both agree
// up to rounding, and resuming needs only the number of steps. An option without a usable default must be given;
// constructors check the options: UsageError.
namespace fulgur::optim {
namespace internal {

// The common part of the schedules: checked options, a name, make().
template <class Self, class SelfOptions>
class SchedulerWith : public LRScheduler {
 public:
  using Options = SelfOptions;
  explicit SchedulerWith(Options options) : options_(std::move(options)) {
    if constexpr (requires(FieldVisitor& visit) { options_.describe(visit); }) check_fields(Self::kName, options_);
  }
  static std::shared_ptr<Self> make(Options options = {}) { return std::make_shared<Self>(std::move(options)); }
  std::string_view name() const final { return Self::kName; }

 protected:
  Options options_;
};

}  // namespace internal

using Schedulers = std::vector<std::shared_ptr<LRScheduler>>;

struct StepLROptions {
  int64_t step_size = 0;  // steps; must be given
  double gamma = 0.1;
  void describe(FieldVisitor& visit);
};

// Multiplies the learning rate by gamma every step_size steps.
class StepLR final : public internal::SchedulerWith<StepLR, StepLROptions> {
 public:
  static constexpr std::string_view kName = "StepLR";
  using SchedulerWith::SchedulerWith;
  double lr(double initial_lr, int64_t step) const override;
};

struct MultiStepLROptions {
  std::vector<int64_t> milestones{};  // steps, in any order; must be given
  double gamma = 0.1;
  void describe(FieldVisitor& visit);
};

// Multiplies the learning rate by gamma at each milestone, and twice at a milestone that is listed twice.
class MultiStepLR final : public internal::SchedulerWith<MultiStepLR, MultiStepLROptions> {
 public:
  static constexpr std::string_view kName = "MultiStepLR";
  explicit MultiStepLR(Options options);
  double lr(double initial_lr, int64_t step) const override;
};

struct ExponentialLROptions {
  double gamma = 0.0;  // above 0; must be given
  void describe(FieldVisitor& visit);
};

// Multiplies the learning rate by gamma every step.
class ExponentialLR final : public internal::SchedulerWith<ExponentialLR, ExponentialLROptions> {
 public:
  static constexpr std::string_view kName = "ExponentialLR";
  explicit ExponentialLR(Options options);
  double lr(double initial_lr, int64_t step) const override;
};

struct ConstantLROptions {
  double factor = 1.0 / 3;  // 0 to 1
  int64_t total_iters = 5;  // steps
  void describe(FieldVisitor& visit);
};

// Multiplies the learning rate by factor, but only in the first total_iters steps.
class ConstantLR final : public internal::SchedulerWith<ConstantLR, ConstantLROptions> {
 public:
  static constexpr std::string_view kName = "ConstantLR";
  using SchedulerWith::SchedulerWith;
  double lr(double initial_lr, int64_t step) const override;
};

struct LinearLROptions {
  double start_factor = 1.0 / 3;  // 0 to 1; torch refuses 0, because it divides by the factor
  double end_factor = 1.0;        // 0 to 1
  int64_t total_iters = 5;        // steps from start_factor to end_factor; 0: end_factor from the start
  void describe(FieldVisitor& visit);
};

// The factor goes in a straight line from start_factor to end_factor and stays there.
class LinearLR final : public internal::SchedulerWith<LinearLR, LinearLROptions> {
 public:
  static constexpr std::string_view kName = "LinearLR";
  using SchedulerWith::SchedulerWith;
  double lr(double initial_lr, int64_t step) const override;
};

struct PolynomialLROptions {
  int64_t total_iters = 5;  // steps until the learning rate is 0
  double power = 1.0;
  void describe(FieldVisitor& visit);
};

// Multiplies the learning rate by (1 - step / total_iters)^power; stays at 0.
class PolynomialLR final : public internal::SchedulerWith<PolynomialLR, PolynomialLROptions> {
 public:
  static constexpr std::string_view kName = "PolynomialLR";
  using SchedulerWith::SchedulerWith;
  double lr(double initial_lr, int64_t step) const override;
};

struct CosineAnnealingLROptions {
  int64_t T_max = 0;     // steps of half a period; must be given
  double eta_min = 0.0;  // the lowest learning rate
  void describe(FieldVisitor& visit);
};

// Half a cosine from the initial learning rate down to eta_min. As in torch it rises again after T_max;
// WarmupCosineLR stays down.
// Source: SGDR, Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts.
class CosineAnnealingLR final : public internal::SchedulerWith<CosineAnnealingLR, CosineAnnealingLROptions> {
 public:
  static constexpr std::string_view kName = "CosineAnnealingLR";
  using SchedulerWith::SchedulerWith;
  double lr(double initial_lr, int64_t step) const override;
};

struct CosineAnnealingWarmRestartsOptions {
  int64_t T_0 = 0;       // steps until the first restart; must be given
  int64_t T_mult = 1;    // length of a period, relative to the one before
  double eta_min = 0.0;  // the lowest learning rate
  void describe(FieldVisitor& visit);
};

// Half a cosine down to eta_min, then again from the top.
// Source: SGDR, Loshchilov and Hutter 2017, arXiv:1608.03983.
class CosineAnnealingWarmRestarts final
    : public internal::SchedulerWith<CosineAnnealingWarmRestarts, CosineAnnealingWarmRestartsOptions> {
 public:
  static constexpr std::string_view kName = "CosineAnnealingWarmRestarts";
  using SchedulerWith::SchedulerWith;
  double lr(double initial_lr, int64_t step) const override;
};

struct OneCycleLROptions {
  double max_lr = 0.0;                  // the peak; 0: each group's own learning rate, instead of torch's list
  int64_t total_steps = 0;              // steps of the whole cycle; must be given
  double pct_start = 0.3;               // fraction of the steps until the peak; three_phase: at most 0.5
  std::string anneal_strategy = "cos";  // cos or linear
  double div_factor = 25.0;             // above 0; starts at max_lr / div_factor
  double final_div_factor = 1e4;        // above 0; ends at max_lr / div_factor / final_div_factor
  bool three_phase = false;             // up, down as fast, then to the end; false: up, then to the end
  void describe(FieldVisitor& visit);
};

// Rises to max_lr, then falls to almost nothing. It is meant for interval = "step".
// Only the learning rate changes: cycle_momentum is not supported (torch's default is true; compare with false).
// After total_steps the last learning rate stays, where torch throws.
// Source: Smith and Topin 2017, arXiv:1708.07120; the two phases are fastai's, as in torch.
class OneCycleLR final : public internal::SchedulerWith<OneCycleLR, OneCycleLROptions> {
 public:
  static constexpr std::string_view kName = "OneCycleLR";
  explicit OneCycleLR(Options options);
  double lr(double initial_lr, int64_t step) const override;

 private:
  double anneal(double start, double end, double fraction) const;
};

struct LambdaLROptions {
  std::function<double(int64_t)> lr_lambda{};  // step -> factor; pure; must be given
};

// Multiplies the learning rate by lr_lambda(step).
class LambdaLR final : public internal::SchedulerWith<LambdaLR, LambdaLROptions> {
 public:
  static constexpr std::string_view kName = "LambdaLR";
  explicit LambdaLR(Options options);
  double lr(double initial_lr, int64_t step) const override;
};

// The options of WarmupCosineLR and WarmupLinearLR.
struct WarmupOptions {
  int64_t warmup_steps = 0;   // steps from 0 up to the initial learning rate
  int64_t total_steps = 0;    // including the warm-up; must be given
  double min_lr_ratio = 0.0;  // the factor at total_steps and after
  void describe(FieldVisitor& visit);
};

// A linear warm-up, then half a cosine down to min_lr_ratio. The first step has a learning rate of 0, unless there is
// no warm-up. It is meant for interval = "step".
// Source: transformers' get_cosine_schedule_with_warmup, with the floor of
// get_cosine_with_min_lr_schedule_with_warmup; those two rise again after total_steps, this schedule stays down.
class WarmupCosineLR final : public internal::SchedulerWith<WarmupCosineLR, WarmupOptions> {
 public:
  static constexpr std::string_view kName = "WarmupCosineLR";
  explicit WarmupCosineLR(Options options);
  double lr(double initial_lr, int64_t step) const override;
};

// Like WarmupCosineLR, but with a straight line down. Source: transformers' get_linear_schedule_with_warmup, which
// ends at 0.
class WarmupLinearLR final : public internal::SchedulerWith<WarmupLinearLR, WarmupOptions> {
 public:
  static constexpr std::string_view kName = "WarmupLinearLR";
  explicit WarmupLinearLR(Options options);
  double lr(double initial_lr, int64_t step) const override;
};

struct ReduceLROnPlateauOptions {
  std::string mode = "min";            // min or max: which metric is better
  double factor = 0.1;                 // factor of each reduction; below 1
  int64_t patience = 10;               // steps in a row without a better metric that change nothing yet
  double threshold = 1e-4;             // smallest improvement that counts as better
  std::string threshold_mode = "rel";  // rel: a fraction of the best metric; abs: a difference from it
  int64_t cooldown = 0;                // steps after a reduction that do not count
  double min_lr = 0.0;                 // lower bound for every group
  double eps = 1e-8;                   // changes of the learning rate up to this size are skipped
  void describe(FieldVisitor& visit);
};

// Multiplies the learning rate by factor whenever the monitored metric has stopped getting better. A NaN is not
// better.
class ReduceLROnPlateau final : public internal::SchedulerWith<ReduceLROnPlateau, ReduceLROnPlateauOptions> {
 public:
  static constexpr std::string_view kName = "ReduceLROnPlateau";
  explicit ReduceLROnPlateau(Options options);
  double lr(double initial_lr, int64_t step) const override;  // after the reductions so far, whatever the step
  bool needs_metric() const override { return true; }
  void observe(double metric) override;
  State state() const override;
  void load_state(const State& state) override;  // throws CheckpointError for another class's state

 private:
  bool is_better(double metric) const;

  bool maximize_;
  bool relative_;
  double best_;
  int64_t num_bad_steps_ = 0;  // in a row
  int64_t cooldown_left_ = 0;  // steps
  int64_t num_reductions_ = 0;
};

struct ChainedSchedulerOptions {
  Schedulers schedulers{};  // at least one
};

// Applies all schedulers at once: each takes the learning rate of the one before as its initial one, so that factors
// multiply. A scheduler that ignores its initial learning rate, such as OneCycleLR with max_lr, must be first. An
// eta_min or min_lr bounds what its own scheduler returns (in torch, its effect in a chain depends on the steps
// before). Unlike torch's, this class accepts ReduceLROnPlateau, which makes a warm-up before a plateau possible:
// {LinearLR, ReduceLROnPlateau}. Until the metric is known the chain steps without it.
class ChainedScheduler final : public internal::SchedulerWith<ChainedScheduler, ChainedSchedulerOptions> {
 public:
  static constexpr std::string_view kName = "ChainedScheduler";
  explicit ChainedScheduler(Options options);
  double lr(double initial_lr, int64_t step) const override;
  bool needs_metric() const override;
  bool steps_without_metric() const override { return true; }
  void observe(double metric) override;
  State state() const override;
  void load_state(const State& state) override;
};

struct SequentialLROptions {
  Schedulers schedulers{};            // at least one; none that needs a metric
  std::vector<int64_t> milestones{};  // sorted steps at which the second, third, ... scheduler begin
};

// Applies one scheduler after the other: each counts its steps from its milestone.
class SequentialLR final : public internal::SchedulerWith<SequentialLR, SequentialLROptions> {
 public:
  static constexpr std::string_view kName = "SequentialLR";
  explicit SequentialLR(Options options);
  double lr(double initial_lr, int64_t step) const override;
  State state() const override;
  void load_state(const State& state) override;
};

}  // namespace fulgur::optim
