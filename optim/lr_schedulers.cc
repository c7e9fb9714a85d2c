#include "fulgur/optim/lr_schedulers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/state.h"

namespace fulgur::optim {
namespace {

template <class... Args>
void require(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) throw UsageError(fmt::format(message, std::forward<Args>(args)...));
}

// How much of `total` is done: 0 to 1.
double fraction(int64_t done, int64_t total) {
  return done >= total ? 1.0 : static_cast<double>(done) / static_cast<double>(total);
}

// Goes from `start` at x = 0 to `end` at x = 1; SGDR, equation 5.
double cosine(double start, double end, double x) {
  return end + (start - end) * (1.0 + std::cos(std::numbers::pi * x)) / 2.0;
}

// The number of milestones that `step` has reached, if they are sorted.
size_t num_reached(const std::vector<int64_t>& milestones, int64_t step) {
  return static_cast<size_t>(std::ranges::upper_bound(milestones, step) - milestones.begin());
}

}  // namespace

void StepLROptions::describe(FieldVisitor& visit) {
  visit({.name = "step_size", .help = "steps from one reduction to the next", .min = 1}, &step_size);
  visit({.name = "gamma", .help = "factor of a reduction", .min = 0}, &gamma);
}

double StepLR::lr(double initial_lr, int64_t step) const {
  return initial_lr * std::pow(options_.gamma, step / options_.step_size);
}

void MultiStepLROptions::describe(FieldVisitor& visit) {
  visit({.name = "milestones", .help = "steps at which the learning rate is reduced"}, &milestones);
  visit({.name = "gamma", .help = "factor of a reduction", .min = 0}, &gamma);
}

MultiStepLR::MultiStepLR(Options options) : SchedulerWith(std::move(options)) {
  std::ranges::sort(options_.milestones);
  require(!options_.milestones.empty(), "MultiStepLR: milestones is empty; write {{.milestones = {{30, 60}}}}");
  require(options_.milestones[0] >= 0, "MultiStepLR: milestones must be at least 0; got {}", options_.milestones[0]);
  require(options_.gamma >= 0, "MultiStepLR: gamma must be at least 0; got {}", options_.gamma);
}

double MultiStepLR::lr(double initial_lr, int64_t step) const {
  return initial_lr * std::pow(options_.gamma, num_reached(options_.milestones, step));
}

void ExponentialLROptions::describe(FieldVisitor& visit) {
  visit({.name = "gamma", .help = "factor of the learning rate at each step", .min = 0}, &gamma);
}

ExponentialLR::ExponentialLR(Options options) : SchedulerWith(options) {
  require(options.gamma > 0, "ExponentialLR: gamma must be above 0; got {}", options.gamma);
}

double ExponentialLR::lr(double initial_lr, int64_t step) const { return initial_lr * std::pow(options_.gamma, step); }

void ConstantLROptions::describe(FieldVisitor& visit) {
  visit({.name = "factor", .help = "factor of the learning rate in the first steps", .min = 0, .max = 1}, &factor);
  visit({.name = "total_iters", .help = "number of steps with the factor", .min = 0}, &total_iters);
}

double ConstantLR::lr(double initial_lr, int64_t step) const {
  return step < options_.total_iters ? initial_lr * options_.factor : initial_lr;
}

void LinearLROptions::describe(FieldVisitor& visit) {
  visit({.name = "start_factor", .help = "factor of the learning rate at the first step", .min = 0, .max = 1},
        &start_factor);
  visit({.name = "end_factor", .help = "factor of the learning rate at step total_iters and after", .min = 0, .max = 1},
        &end_factor);
  visit({.name = "total_iters", .help = "steps from start_factor to end_factor", .min = 0}, &total_iters);
}

double LinearLR::lr(double initial_lr, int64_t step) const {
  return initial_lr * std::lerp(options_.start_factor, options_.end_factor, fraction(step, options_.total_iters));
}

void PolynomialLROptions::describe(FieldVisitor& visit) {
  visit({.name = "total_iters", .help = "steps until the learning rate is 0", .min = 1}, &total_iters);
  visit({.name = "power", .help = "exponent of the polynomial", .min = 0}, &power);
}

double PolynomialLR::lr(double initial_lr, int64_t step) const {
  return initial_lr * std::pow(1.0 - fraction(step, options_.total_iters), options_.power);
}

void CosineAnnealingLROptions::describe(FieldVisitor& visit) {
  visit({.name = "T_max", .help = "number of steps in half a period", .min = 1}, &T_max);
  visit({.name = "eta_min", .help = "lowest learning rate", .min = 0}, &eta_min);
}

double CosineAnnealingLR::lr(double initial_lr, int64_t step) const {
  return cosine(initial_lr, options_.eta_min, static_cast<double>(step) / static_cast<double>(options_.T_max));
}

void CosineAnnealingWarmRestartsOptions::describe(FieldVisitor& visit) {
  visit({.name = "T_0", .help = "steps until the first restart", .min = 1}, &T_0);
  visit({.name = "T_mult", .help = "length of a period, relative to the one before", .min = 1}, &T_mult);
  visit({.name = "eta_min", .help = "lowest learning rate", .min = 0}, &eta_min);
}

double CosineAnnealingWarmRestarts::lr(double initial_lr, int64_t step) const {
  int64_t period = options_.T_0;
  if (options_.T_mult == 1) step %= period;
  while (step >= period) {
    step -= period;
    period *= options_.T_mult;
  }
  return cosine(initial_lr, options_.eta_min, fraction(step, period));
}

void OneCycleLROptions::describe(FieldVisitor& visit) {
  visit({.name = "max_lr", .help = "peak learning rate; 0: each group's own", .min = 0}, &max_lr);
  visit({.name = "total_steps", .help = "number of steps in the cycle", .min = 1}, &total_steps);
  visit({.name = "pct_start", .help = "fraction of the steps in which the learning rate rises", .min = 0, .max = 1},
        &pct_start);
  visit({.name = "anneal_strategy", .help = "shape of the curve", .choices = {"cos", "linear"}}, &anneal_strategy);
  visit({.name = "div_factor", .help = "peak learning rate divided by the first", .min = 0}, &div_factor);
  visit({.name = "final_div_factor", .help = "first learning rate divided by the last", .min = 0}, &final_div_factor);
  visit({.name = "three_phase", .help = "fall as fast as the rise, then anneal to the end"}, &three_phase);
}

OneCycleLR::OneCycleLR(Options options) : SchedulerWith(std::move(options)) {
  options_.anneal_strategy = canonical_name(options_.anneal_strategy);
  require(options_.div_factor > 0 && options_.final_div_factor > 0,
          "OneCycleLR: div_factor and final_div_factor must be above 0; got {} and {}", options_.div_factor,
          options_.final_div_factor);
  require(!options_.three_phase || options_.pct_start <= 0.5,
          "OneCycleLR: pct_start must be at most 0.5 with three_phase; got {}", options_.pct_start);
}

double OneCycleLR::anneal(double start, double end, double fraction) const {
  return options_.anneal_strategy == "cos" ? cosine(start, end, fraction) : std::lerp(start, end, fraction);
}

double OneCycleLR::lr(double initial_lr, int64_t step) const {
  const double peak = options_.max_lr > 0 ? options_.max_lr : initial_lr;
  const double first = peak / options_.div_factor, last = first / options_.final_div_factor;
  const double end = static_cast<double>(options_.total_steps - 1);
  const double up = options_.pct_start * static_cast<double>(options_.total_steps);
  const double now = std::min(static_cast<double>(step), end);

  // torch's arithmetic: the phases end at up - 1, 2 * up - 2 and total_steps - 1.
  if (now <= up - 1) return up > 1 ? anneal(first, peak, now / (up - 1)) : peak;
  if (!options_.three_phase) return anneal(peak, last, (now - (up - 1)) / (end - (up - 1)));
  if (now <= 2 * up - 2) return anneal(peak, first, (now - (up - 1)) / (up - 1));
  return anneal(first, last, (now - (2 * up - 2)) / (end - (2 * up - 2)));
}

LambdaLR::LambdaLR(Options options) : SchedulerWith(std::move(options)) {
  require(options_.lr_lambda != nullptr,
          "LambdaLR: lr_lambda is empty; write {{.lr_lambda = [](int64_t step) {{ ... }}}}");
}

double LambdaLR::lr(double initial_lr, int64_t step) const { return initial_lr * options_.lr_lambda(step); }

void WarmupOptions::describe(FieldVisitor& visit) {
  visit({.name = "warmup_steps", .help = "steps from 0 up to the initial learning rate", .min = 0}, &warmup_steps);
  visit({.name = "total_steps", .help = "number of steps, including the warm-up", .min = 1}, &total_steps);
  visit({.name = "min_lr_ratio", .help = "factor of the learning rate at the end", .min = 0, .max = 1}, &min_lr_ratio);
}

namespace {

void check_warmup(std::string_view name, const WarmupOptions& options) {
  require(options.warmup_steps <= options.total_steps, "{}: warmup_steps ({}) must be at most total_steps ({})", name,
          options.warmup_steps, options.total_steps);
}

// Rises linearly, then follows `decay(1, min_lr_ratio, x)` as x goes from 0 to 1.
template <class Decay>
double warmup_factor(const WarmupOptions& options, int64_t step, Decay decay) {
  if (step < options.warmup_steps) return fraction(step, options.warmup_steps);
  const double x = fraction(step - options.warmup_steps, options.total_steps - options.warmup_steps);
  return decay(1.0, options.min_lr_ratio, x);
}

}  // namespace

WarmupCosineLR::WarmupCosineLR(Options options) : SchedulerWith(options) { check_warmup(kName, options); }

double WarmupCosineLR::lr(double initial_lr, int64_t step) const {
  return initial_lr * warmup_factor(options_, step, cosine);
}

WarmupLinearLR::WarmupLinearLR(Options options) : SchedulerWith(options) { check_warmup(kName, options); }

double WarmupLinearLR::lr(double initial_lr, int64_t step) const {
  return initial_lr * warmup_factor(options_, step, [](double a, double b, double x) { return std::lerp(a, b, x); });
}

void ReduceLROnPlateauOptions::describe(FieldVisitor& visit) {
  visit({.name = "mode", .help = "whether a lower or a higher metric is better", .choices = {"min", "max"}}, &mode);
  visit({.name = "factor", .help = "factor of each reduction", .min = 0}, &factor);
  visit({.name = "patience", .help = "steps without a better metric that change nothing yet", .min = 0}, &patience);
  visit({.name = "threshold", .help = "smallest improvement that counts as better", .min = 0}, &threshold);
  visit(
      {.name = "threshold_mode", .help = "how threshold is measured: relative or absolute", .choices = {"rel", "abs"}},
      &threshold_mode);
  visit({.name = "cooldown", .help = "steps after a reduction that do not count", .min = 0}, &cooldown);
  visit({.name = "min_lr", .help = "lowest learning rate", .min = 0}, &min_lr);
  visit({.name = "eps", .help = "skip changes of the learning rate up to this size", .min = 0}, &eps);
}

ReduceLROnPlateau::ReduceLROnPlateau(Options options)
    : SchedulerWith(std::move(options)),
      maximize_(canonical_name(options_.mode) == "max"),
      relative_(canonical_name(options_.threshold_mode) == "rel"),
      best_(maximize_ ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  require(options_.factor < 1, "ReduceLROnPlateau: factor must be below 1; got {}", options_.factor);
}

double ReduceLROnPlateau::lr(double initial_lr, int64_t /*step*/) const {
  double lr = initial_lr;
  for (int64_t i = 0; i < num_reductions_; ++i) {
    const double reduced = std::max(lr * options_.factor, options_.min_lr);
    if (!(lr - reduced > options_.eps)) break;  // further reductions would change nothing, either
    lr = reduced;
  }
  return lr;
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const double threshold = maximize_ ? options_.threshold : -options_.threshold;
  const double bar = relative_ ? best_ * (1.0 + threshold) : best_ + threshold;
  return maximize_ ? metric > bar : metric < bar;
}

void ReduceLROnPlateau::observe(double metric) {
  if (is_better(metric)) {
    best_ = metric;
    num_bad_steps_ = 0;
  } else {
    ++num_bad_steps_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    num_bad_steps_ = 0;
  }
  if (num_bad_steps_ > options_.patience) {
    ++num_reductions_;
    cooldown_left_ = options_.cooldown;
    num_bad_steps_ = 0;
  }
}

State ReduceLROnPlateau::state() const {
  State state;
  state.set("best", best_);
  state.set("num_bad_steps", num_bad_steps_);
  state.set("cooldown_left", cooldown_left_);
  state.set("num_reductions", num_reductions_);
  return state;
}

void ReduceLROnPlateau::load_state(const State& state) {
  try {
    best_ = state.get<double>("best");
    num_bad_steps_ = state.get<int64_t>("num_bad_steps");
    cooldown_left_ = state.get<int64_t>("cooldown_left");
    num_reductions_ = state.get<int64_t>("num_reductions");
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("not a state of ReduceLROnPlateau: {}", error.what()));
  }
}

namespace {

void check_schedulers(std::string_view name, const Schedulers& schedulers) {
  require(!schedulers.empty(), "{}: schedulers is empty; write {{.schedulers = {{LinearLR::make(), ...}}}}", name);
  require(std::ranges::find(schedulers, nullptr) == schedulers.end(), "{}: a scheduler is null", name);
}

std::string child_name(size_t i) { return fmt::format("schedulers/{}", i); }

State states_of(const Schedulers& schedulers) {
  State states;
  states.set("num_schedulers", static_cast<int64_t>(schedulers.size()));
  for (size_t i = 0; i < schedulers.size(); ++i) states.set_child(child_name(i), schedulers[i]->state());
  return states;
}

void load_states(std::string_view name, const Schedulers& schedulers, const State& state) {
  const auto* count = state.find<int64_t>("num_schedulers");
  if (count == nullptr || *count != std::ssize(schedulers)) {
    throw CheckpointError(fmt::format("not a state of {} with {} schedulers: it has {}", name, schedulers.size(),
                                      count == nullptr ? 0 : *count));
  }
  for (size_t i = 0; i < schedulers.size(); ++i) schedulers[i]->load_state(state.child(child_name(i)));
}

}  // namespace

ChainedScheduler::ChainedScheduler(Options options) : SchedulerWith(std::move(options)) {
  check_schedulers(kName, options_.schedulers);
}

double ChainedScheduler::lr(double initial_lr, int64_t step) const {
  double lr = initial_lr;
  for (const auto& scheduler : options_.schedulers) lr = scheduler->lr(lr, step);
  return lr;
}

bool ChainedScheduler::needs_metric() const {
  return std::ranges::any_of(options_.schedulers, [](const auto& scheduler) { return scheduler->needs_metric(); });
}

void ChainedScheduler::observe(double metric) {
  for (const auto& scheduler : options_.schedulers) scheduler->observe(metric);
}

State ChainedScheduler::state() const { return states_of(options_.schedulers); }
void ChainedScheduler::load_state(const State& state) { load_states(kName, options_.schedulers, state); }

SequentialLR::SequentialLR(Options options) : SchedulerWith(std::move(options)) {
  const auto& [schedulers, milestones] = options_;
  check_schedulers(kName, schedulers);
  for (const auto& scheduler : schedulers) {
    require(!scheduler->needs_metric(), "SequentialLR: {} needs a metric; put it in a ChainedScheduler",
            scheduler->name());
  }
  require(milestones.size() + 1 == schedulers.size(),
          "SequentialLR: {} schedulers need {} in milestones, the step at which each but the first begins; got {}",
          schedulers.size(), schedulers.size() - 1, milestones.size());
  require(std::ranges::is_sorted(milestones) && (milestones.empty() || milestones[0] >= 0),
          "SequentialLR: milestones must be at least 0, none before another; got [{}]", fmt::join(milestones, ","));
}

double SequentialLR::lr(double initial_lr, int64_t step) const {
  const size_t current = num_reached(options_.milestones, step);
  const int64_t begin = current == 0 ? 0 : options_.milestones[current - 1];
  return options_.schedulers[current]->lr(initial_lr, step - begin);
}

State SequentialLR::state() const { return states_of(options_.schedulers); }
void SequentialLR::load_state(const State& state) { load_states(kName, options_.schedulers, state); }

}  // namespace fulgur::optim
