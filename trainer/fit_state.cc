#include "fulgur/trainer/fit_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/listed.h"
#include "fulgur/base/logging.h"
#include "fulgur/trainer/callback_states.h"

namespace fulgur {
namespace {

void check_num_schedules(const State& run, size_t num_schedules) {
  size_t num_saved = 0;
  while (!run.child(fmt::format("lr_schedules/{}", num_saved)).empty()) ++num_saved;
  if (num_saved == num_schedules) return;
  throw CheckpointError(
      fmt::format("the checkpoint has the state of {} learning-rate schedule{}, but configure_optimizers returns {} "
                  "now; return as many, or load the weights only",
                  num_saved, num_saved == 1 ? "" : "s", num_schedules));
}

}  // namespace

void name_folder_in_errors(const CheckpointReader& checkpoint, const std::function<void()>& load) try {
  load();
} catch (const CheckpointError& error) {
  const std::string folder = checkpoint.folder().string();
  const std::string_view message = error.what();
  if (message.find(folder) != message.npos) throw;
  throw CheckpointError(fmt::format("{}: {}", folder, message));
}

CheckpointContent content_of(Module& module, NamedTensors weights) {
  CheckpointContent content;
  State own;
  module.on_save_checkpoint(own);
  content.run.set_child("module", own);
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : weights) names.emplace(tensor.unsafeGetTensorImpl(), name);
  for (const auto& part : module.named_modules("", /*include_self=*/true)) {
    const std::string prefix = part.key().empty() ? "" : part.key() + ".";
    for (const auto& tensors :
         {part.value()->named_parameters(/*recurse=*/false), part.value()->named_buffers(/*recurse=*/false)}) {
      for (const auto& item : tensors) {
        const auto original = names.find(item.value().unsafeGetTensorImpl());
        const std::string name = prefix + item.key();
        if (original != names.end() && original->second != name) content.aliases.emplace_back(name, original->second);
      }
    }
  }
  content.weights = std::move(weights);
  content.run.set_child("hyper_parameters", module.hyper_parameters());
  return content;
}

void load_requires_grad(Module& module, const CheckpointReader& checkpoint, bool tells) {
  const State frozen = checkpoint.run().child("frozen");
  std::vector<std::string> changed;
  for (const auto& item : module.named_parameters()) {
    at::Tensor param = item.value();
    const bool requires_grad = frozen.find<bool>(item.key()) == nullptr;
    if (!param.is_floating_point() || param.requires_grad() == requires_grad) continue;
    param.set_requires_grad(requires_grad);
    changed.push_back(fmt::format("'{}' is {}", item.key(), requires_grad ? "trained" : "frozen"));
  }
  if (changed.empty() || !tells) return;
  log_info("as in the checkpoint, and not as {} has them: {}", module.name(), listed(std::move(changed)));
}

void estimate_steps(FitLoop& loop, const CheckpointReader& checkpoint) {
  name_folder_in_errors(
      checkpoint, [&] { loop.estimate_steps_from(checkpoint.run().child("loops"), checkpoint.manifest().world_size); });
}

void FitState::add_to(CheckpointContent& content) const {
  State& run = content.run;
  StrategyState strategy = context.strategy.state();
  content.ranges = std::move(strategy.ranges);
  run.set("strategy/name", context.strategy.name());
  run.set("strategy/world_size", context.world.world_size());
  run.set("strategy/precision", std::string(context.precision.name()));
  run.set_child("strategy/state", strategy.shared);
  run.set_child("loops", loop.state());
  for (size_t i = 0; i < steps.lr_schedules().size(); ++i) {
    run.set_child(fmt::format("lr_schedules/{}", i), steps.lr_schedules()[i].state());
  }
  for (const auto& item : context.hooks.module().named_parameters()) {
    if (!item.value().requires_grad()) run.set("frozen/" + item.key(), true);
  }
  run.set_child("callbacks", states_of(callbacks));
  content.rank = loop.rank_state();
  const State metrics = content.rank.child("metrics");
  for (const std::string ended : {"callback_metrics", "progress_bar_metrics", "logged_metrics"}) {
    run.set_child("metrics/" + ended, metrics.child(ended));
  }
}

// Learning rates continue as in the checkpoint. Logs so if configure_optimizers has requested others now.
void FitState::log_kept_learning_rates(const std::vector<double>& asked) const {
  size_t next = 0;
  for (const auto& optimizer : context.strategy.optimizers()) {
    const auto follows = [&](const LRSchedule& schedule) { return &schedule.optimizer() == optimizer.get(); };
    const bool has_schedule = std::ranges::any_of(steps.lr_schedules(), follows);
    for (const Optimizer::Group& group : optimizer->groups()) {
      const double lr = next < asked.size() ? asked[next] : group.lr;
      ++next;
      if (has_schedule || group.lr == lr) continue;
      log_info("the learning rate {} of the checkpoint is kept, instead of {}: ckpt_weights_only = true starts over",
               group.lr, lr);
      return;
    }
  }
}

void FitState::load(const CheckpointReader& checkpoint) const {
  std::vector<double> asked;
  for (const auto& optimizer : context.strategy.optimizers()) {
    for (const Optimizer::Group& group : optimizer->groups()) asked.push_back(group.lr);
  }
  name_folder_in_errors(checkpoint, [&] {
    const State& run = checkpoint.run();
    load_training(checkpoint);
    log_kept_learning_rates(asked);
    check_num_schedules(run, steps.lr_schedules().size());
    for (size_t i = 0; i < steps.lr_schedules().size(); ++i) {
      steps.lr_schedules()[i].load_state(run.child(fmt::format("lr_schedules/{}", i)));
    }
    load_states(callbacks, run.child("callbacks"), /*warns=*/context.world.rank() == 0);
    const int64_t world_size = checkpoint.manifest().world_size;
    const bool same_ranks = world_size == context.world.world_size();
    loop.load_state(run.child("loops"), world_size, run.child("metrics"),
                    same_ranks ? checkpoint.rank(context.world.rank()) : State());
    if (has_same_callbacks(callbacks, run.child("callbacks"))) loop.load_stop(run.child("loops"));
  });
}

// Callbacks that average weights go back too, because the average does.
void FitState::roll_back(const CheckpointReader& checkpoint) const {
  std::vector<std::pair<double, double>> settings;  // learning rate and weight decay of each group
  for (const auto& optimizer : context.strategy.optimizers()) {
    for (const Optimizer::Group& group : optimizer->groups()) settings.emplace_back(group.lr, group.weight_decay);
  }
  name_folder_in_errors(checkpoint, [&] {
    load_training(checkpoint);
    CallbackList averaging;
    std::ranges::copy_if(callbacks, std::back_inserter(averaging), [](const auto& c) { return c->averages_weights(); });
    load_states(averaging, checkpoint.run().child("callbacks"), /*warns=*/false);
  });
  auto next = settings.begin();
  for (const auto& optimizer : context.strategy.optimizers()) {
    for (Optimizer::Group& group : optimizer->groups()) std::tie(group.lr, group.weight_decay) = *next++;
  }
}

// Loads the state that belongs to the weights: that of the strategy and of the Module.
void FitState::load_training(const CheckpointReader& checkpoint) const {
  const State& run = checkpoint.run();
  context.strategy.load_state(run.child("strategy/state"), [&](const std::string& name, int64_t begin, int64_t end) {
    return checkpoint.read(name, begin, end);
  });
  context.hooks.located("on_load_checkpoint", HookCaller::WhatRuns::run,
                        [&] { context.hooks.module().on_load_checkpoint(run.child("module")); });
}

}  // namespace fulgur
