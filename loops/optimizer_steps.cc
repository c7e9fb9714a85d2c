#include "fulgur/loops/optimizer_steps.h"

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/core/gradient_clipping.h"

namespace fulgur {
namespace {

void check_automatic(const Module& module, const Optimizers& optimizers) {
  if (optimizers.size() > 1) {
    throw SetupError(
        fmt::format("{}::configure_optimizers returned {} optimizers, but automatic optimisation steps one; set "
                    "automatic_optimization = false in the constructor and step them in training_step",
                    module.name(), optimizers.size()));
  }
}

void check_manual(const Module& module, const Optimizers& optimizers, const LoopPlan& plan) {
  const auto refuse = [&](std::string_view option, auto value) {
    throw SetupError(
        fmt::format("{} optimises manually, so that {} = {} would have no effect; do it in training_step, or "
                    "leave automatic_optimization true",
                    module.name(), option, value));
  };
  for (const auto& optimizer : optimizers) {
    if (!optimizer->needs_closure()) continue;
    throw SetupError(
        fmt::format("{} evaluates the loss by itself, which only automatic optimisation offers, but {} optimises "
                    "manually; leave automatic_optimization true",
                    optimizer->name(), module.name()));
  }
  if (plan.accumulate_grad_batches != 1) refuse("accumulate_grad_batches", plan.accumulate_grad_batches);
  if (plan.clipping.active()) refuse("gradient_clip_val", plan.clipping.value);
}

void check_can_be_judged(const Module& module, const Optimizers& optimizers) {
  const auto refuse = [](const std::string& who) {
    throw SetupError(who +
                     ", so that a callback cannot judge updates before they are made; leave DivergenceGuard, or "
                     "the callback that judges_updates(), out");
  };
  if (!module.automatic_optimization) refuse(module.name() + " optimises manually");
  for (const auto& optimizer : optimizers) {
    if (optimizer->needs_closure()) refuse(std::string(optimizer->name()) + " evaluates the loss by itself");
  }
}

void check_has_norm(const Optimizers& optimizers) {
  for (const auto& optimizer : optimizers) {
    if (!optimizer->needs_closure()) continue;
    throw SetupError(fmt::format(
        "{} evaluates the loss and its gradients several times in a step, so that a step has no gradient norm; "
        "leave GradientNormMonitor, or the callback that wants_grad_norm(), out",
        optimizer->name()));
  }
}

}  // namespace

OptimizerSteps::OptimizerSteps(LoopContext& context, Optimizers optimizers) : context_(context) {
  const Module& module = context.hooks.module();
  module.automatic_optimization ? check_automatic(module, optimizers) : check_manual(module, optimizers, context.plan);
  wants_gradients_ = context.overridden.on_before_optimizer_step || context.overridden.configure_gradient_clipping ||
                     std::ranges::any_of(context.hooks.callbacks(), [](const auto& c) { return c->wants_gradients(); });
  wants_grad_norm_ = std::ranges::any_of(context.hooks.callbacks(), [](const auto& c) { return c->wants_grad_norm(); });
  judges_updates_ = std::ranges::any_of(context.hooks.callbacks(), [](const auto& c) { return c->judges_updates(); });
  if (judges_updates_) check_can_be_judged(module, optimizers);
  if (wants_grad_norm_) check_has_norm(optimizers);
  context.strategy.setup_optimizers(std::move(optimizers));
  check_accumulation(context.accumulate_grad_batches);
  const Optimizers& all = context.strategy.optimizers();
  for (const auto& [optimizer, config] : all.schedulers()) schedules_.emplace_back(config, all[optimizer]);
}

void OptimizerSteps::zero_grad(size_t optimizer) {
  context_.hooks(hooks::on_before_zero_grad);
  context_.strategy.zero_grad(optimizer);
}

void OptimizerSteps::backward(const at::Tensor& loss) {
  context_.hooks(hooks::on_before_backward, loss);
  context_.hooks.located("backward", HookCaller::WhatRuns::batch, [&] { context_.strategy.manual_backward(loss); });
  context_.hooks(hooks::on_after_backward);
}

void OptimizerSteps::backward(const at::Tensor& loss, bool is_last) {
  context_.hooks(hooks::on_before_backward, loss);
  context_.hooks.located("backward", HookCaller::WhatRuns::batch, [&] { context_.strategy.backward(loss, is_last); });
  context_.hooks(hooks::on_after_backward);
}

bool OptimizerSteps::step(size_t optimizer, int64_t micro_batches, double loss) {
  StepRequest request{.micro_batches = micro_batches,
                      .clipping = context_.plan.clipping,
                      .wants_norm = wants_grad_norm_ || judges_updates_,
                      .next_lr = [this, optimizer] { return lr_after_step(optimizer); }};
  const at::Tensor norm = before_step(optimizer, request);
  if (judges_updates_) {
    request.accepts = [&](const at::Tensor& of_step) {
      return context_.hooks.accepts_update(loss, (norm.defined() ? norm : of_step).item<double>());
    };
  }
  const bool stepped = update(optimizer, request);
  if (norm.defined()) context_.state.step_report.grad_norm = norm;
  return stepped;
}

bool OptimizerSteps::step(const Closure& closure) {
  StepRequest request;
  request.closure = [&] {
    at::Tensor loss = closure();
    StepRequest evaluated{.micro_batches = end_evaluation({.micro_batches = 1}).micro_batches,
                          .clipping = context_.plan.clipping};
    if (evaluated.micro_batches > 1) {  // summed over several ranks
      context_.strategy.materialize_gradients(0, std::exchange(evaluated.micro_batches, 1));
      double mean = loss.item<double>();
      context_.ranks.all_reduce({&mean, 1}, Reduction::mean);
      loss = at::scalar_tensor(mean, loss.options());
    }
    before_step(0, evaluated);
    clip_gradients(optimizers()[0].params(), evaluated.clipping);
    return loss;
  };
  return update(0, request);
}

void OptimizerSteps::skip_closure() { end_evaluation({.ends_epoch = true}); }

// How often an optimizer evaluates the loss depends on the losses, so that either all ranks take part or none.
AccumulationWindow OptimizerSteps::end_evaluation(const AccumulationWindow& mine) {
  const AccumulationWindow all = context_.strategy.end_micro_batch(mine, /*is_last=*/true);
  if (!all.ends_epoch || all.micro_batches == 0) return all;
  throw SetupError(
      fmt::format("on_train_batch_start returned skip_epoch on some of the ranks, but {} evaluates the loss on all of "
                  "them, as often as it needs; return skip_epoch on every rank or on none",
                  optimizers()[0].name()));
}

void OptimizerSteps::check_accumulation(int64_t accumulate_grad_batches) const {
  if (accumulate_grad_batches == 1 || !needs_closure()) return;
  throw SetupError(fmt::format("{} computes the gradients itself, of one batch; accumulate_grad_batches = {} must be 1",
                               optimizers()[0].name(), accumulate_grad_batches));
}

// Returns the norm that the step is to report, if the Module clips the gradients here, before the step can measure it.
at::Tensor OptimizerSteps::before_step(size_t index, StepRequest& request) {
  Optimizer& optimizer = optimizers()[index];
  if (wants_gradients_) {
    context_.strategy.materialize_gradients(index, request.micro_batches);
    request.micro_batches = 1;
  }
  context_.hooks(hooks::on_before_optimizer_step, optimizer);
  if (!context_.overridden.configure_gradient_clipping) return {};
  const at::Tensor norm = std::exchange(request.wants_norm, false) ? gradient_norm(optimizer.params()) : at::Tensor();
  context_.hooks.within(hooks::configure_gradient_clipping,
                        [&] { context_.hooks.module().configure_gradient_clipping(optimizer, request.clipping); });
  request.clipping = {};
  return norm;
}

bool OptimizerSteps::update(size_t index, StepRequest request) {
  std::optional<StepReport> report;
  bool is_refused = false;  // by a callback
  if (request.accepts) {
    request.accepts = [&is_refused, accepts = std::move(request.accepts)](const at::Tensor& norm) {
      is_refused = !accepts(norm);
      return !is_refused;
    };
  }
  context_.hooks.within(hooks::optimizer_step, [&] {
    context_.hooks.module().optimizer_step(optimizers()[index],
                                           [&] { report = context_.strategy.optimizer_step(index, request); });
  });
  if (!report) context_.strategy.drain();  // as in every step that is left out: forward reads the weights as they are
  if (report && report->skipped && !is_refused) {
    warn_skipped_(
        "the gradients of epoch {}, batch {} were not finite at a loss scale of {}: the step was skipped and the loss "
        "scale is reduced; this is normal now and then, and is not logged again",
        context_.state.epoch, context_.state.batch_idx, report->loss_scale);
  }
  context_.state.step_report = std::move(report).value_or(StepReport{.skipped = true});
  const bool stepped = !context_.state.step_report.skipped;
  if (stepped) context_.world.set_step(++context_.state.global_step);
  return stepped;
}

void OptimizerSteps::scale_lr(size_t optimizer, size_t group, double factor) {
  if (optimizer >= optimizers().size() || group >= optimizers()[optimizer].groups().size()) {
    throw UsageError(
        fmt::format("scale_lr: there is no parameter group {} of optimizer {}; both count from 0", group, optimizer));
  }
  if (!(factor > 0.0 && std::isfinite(factor))) {
    throw UsageError(fmt::format("scale_lr: the factor must be above 0 and finite; got {}", factor));
  }
  for (LRSchedule& schedule : schedules_) {
    if (&schedule.optimizer() == &optimizers()[optimizer]) schedule.scale(group, factor);
  }
  optimizers()[optimizer].groups()[group].lr *= factor;
}

void OptimizerSteps::move_schedules(std::string_view interval, Kind kind) {
  if (context_.plan.keeps_lr) return;
  const int64_t count = interval == "step" ? context_.state.global_step : context_.state.epoch + 1;
  for (LRSchedule& schedule : schedules_) {
    const LRSchedulerConfig& config = schedule.config();
    const bool is_kind = config.scheduler->needs_metric() == (kind == Kind::plateau);
    if (is_kind && config.interval == interval && count % config.frequency == 0) move(schedule);
  }
}

// The learning rates, by group, that schedules by step will set after the coming step; the present ones if there is
// none. Schedules by epoch do not matter: no update is in progress when an epoch ends.
std::vector<double> OptimizerSteps::lr_after_step(size_t optimizer) const {
  std::vector<double> lr;
  const Optimizer& stepping = optimizers()[optimizer];
  for (const Optimizer::Group& group : stepping.groups()) lr.push_back(group.lr);
  for (const LRSchedule& schedule : schedules_) {
    if (context_.plan.keeps_lr) break;
    const LRSchedulerConfig& config = schedule.config();
    const bool moves = config.interval == "step" && (context_.state.global_step + 1) % config.frequency == 0;
    if (&schedule.optimizer() != &stepping || !moves || config.scheduler->needs_metric()) continue;
    for (size_t g = 0; g < lr.size(); ++g) lr[g] = schedule.lr_after_step(g);
  }
  return lr;
}

void OptimizerSteps::move(LRSchedule& schedule) {
  const LRSchedulerConfig& config = schedule.config();
  std::optional<double> metric;
  if (!config.monitor.empty() && config.scheduler->needs_metric()) {
    const Metrics metrics = context_.metrics.callback_metrics();
    const auto found = metrics.find(config.monitor);
    if (found != metrics.end()) {
      metric = found->second;
      context_.ranks.all_reduce({&*metric, 1}, Reduction::mean);  // keeps learning rates the same on all ranks
    } else {
      const bool steps_without = config.scheduler->steps_without_metric();
      if (!steps_without || !may_be_logged_yet(config)) tell_unknown_monitor(schedule, metrics);
      if (!steps_without) return;
    }
  }
  context_.hooks.within(hooks::lr_scheduler_step, [&] { context_.hooks.module().lr_scheduler_step(schedule, metric); });
}

// The first validation logs the monitor, or, without validations, the end of the first epoch.
bool OptimizerSteps::may_be_logged_yet(const LRSchedulerConfig& config) const {
  const RunState& state = context_.state;
  if (state.has_validation) return !state.has_validated;
  return config.interval == "step" && state.epoch == 0;
}

void OptimizerSteps::tell_unknown_monitor(const LRSchedule& schedule, const Metrics& metrics) {
  const LRSchedulerConfig& config = schedule.config();
  const std::string message =
      fmt::format("{}: {}", config.scheduler->name(), unknown_name_message("monitor", config.monitor, metrics.names()));
  if (config.strict) throw SetupError(message + "; log it, or set strict = false to skip such steps");
  if (!warned_missing_.insert(&schedule).second) return;
  const bool steps = config.scheduler->steps_without_metric();
  log_warning("{}; {} until it is there", message, steps ? "the schedule steps without it" : "the learning rate stays");
}

}  // namespace fulgur
