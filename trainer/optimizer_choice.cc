#include "fulgur/trainer/optimizer_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/core/lr_scheduler.h"
#include "fulgur/core/module.h"
#include "fulgur/optim/lr_scheduler_registry.h"
#include "fulgur/optim/optimizer_registry.h"

namespace fulgur {
namespace {

constexpr const char* kNone = "none";
constexpr size_t kNamesShown = 10;  // in a message

// The names of a registry, and none.
template <class Registry>
std::vector<std::string> names_of(const Registry& registry) {
  std::vector<std::string> names{kNone};
  names.insert(names.end(), registry.names().begin(), registry.names().end());
  return names;
}

// Visits the settings of when a schedule steps, which no scheduler describes itself.
void describe_config(FieldVisitor& visit, LRSchedulerConfig& config) {
  visit({.name = "interval", .help = "what the schedule counts", .choices = {"epoch", "step"}}, &config.interval);
  visit({.name = "frequency", .help = "intervals from one step of the schedule to the next", .min = 1},
        &config.frequency);
  visit({.name = "monitor", .help = "metric that the schedule follows"}, &config.monitor);
  visit({.name = "strict", .help = "end the run if the monitor was not logged"}, &config.strict);
  visit({.name = "name", .help = "name of the learning rate in logs; empty: lr-<optimizer>"}, &config.name);
}

struct Scheduler {
  std::unique_ptr<optim::LRSchedulerRegistry::Draft> draft;
  LRSchedulerConfig config{};

  explicit Scheduler(std::string_view name) : draft(optim::lr_scheduler_registry().begin(name)) {}
  void describe(FieldVisitor& visit) {
    draft->describe(visit);
    describe_config(visit, config);
  }
};

LRSchedulerConfig scheduler_of(const Choice& choice) {
  Scheduler scheduler(choice.name());
  choice.apply("scheduler", choice.name(), [&](FieldVisitor& visit) { scheduler.describe(visit); });
  scheduler.config.scheduler = scheduler.draft->make();
  check_scheduler_config(scheduler.config);
  return scheduler.config;
}

auto optimizer_of(const Choice& choice) {
  auto draft = optim::optimizer_registry().begin(choice.name());
  choice.apply("optimizer", choice.name(), [&](FieldVisitor& visit) { draft->describe(visit); });
  return draft;
}

std::vector<ParamGroup> groups_of(const Module& module, const std::vector<ParamGroupOptions>& options) {
  std::vector<ParamGroup> groups;
  std::vector<std::string> names;
  for (const ParamGroupOptions& group : options) {
    groups.push_back({.lr = group.lr, .weight_decay = group.weight_decay, .name = group.name});
  }
  ParamGroup others;
  for (const auto& item : module.named_parameters()) {
    names.push_back(item.key());
    size_t i = 0;
    while (i < options.size() && fnmatch(options[i].match.c_str(), item.key().c_str(), 0) != 0) ++i;
    (i < options.size() ? groups[i] : others).params.push_back(item.value());
  }
  for (size_t i = 0; i < options.size(); ++i) {
    if (!groups[i].params.empty()) continue;
    throw UsageError(fmt::format(
        "optimizer.groups: no parameter of {} is in the group of '{}': none has such a name, or "
        "earlier groups have them all; the names are {}{}",
        module.name(), options[i].match, fmt::join(std::span(names).first(std::min(names.size(), kNamesShown)), ", "),
        names.size() > kNamesShown ? ", ..." : ""));
  }
  if (!others.params.empty()) groups.push_back(std::move(others));
  return groups;
}

}  // namespace

void ParamGroupOptions::describe(FieldVisitor& visit) {
  visit({.name = "match", .help = "names of the parameters, such as *.bias"}, &match);
  visit({.name = "name", .help = "name of the group"}, &name);
  visit({.name = "lr", .help = "learning rate; none: the optimizer's", .min = 0}, &lr);
  visit({.name = "weight_decay", .help = "weight decay; none: the optimizer's", .min = 0}, &weight_decay);
}

void OptimizerChoice::describe(FieldVisitor& visit) {
  optimizer_.describe(
      visit, {.name = "optimizer", .help = "what to make for a module without configure_optimizers", .is_common = true},
      {.names = names_of(optim::optimizer_registry()), .describe = [](const std::string& name, FieldVisitor& settings) {
         if (canonical_name(name) != kNone) optim::optimizer_registry().begin(name)->describe(settings);
       }});
  visit.list({.name = "optimizer.groups", .help = "parameters with a learning rate or weight decay of their own"},
             list_of(groups_));
  scheduler_.describe(visit, {.name = "scheduler", .help = "how the learning rate of this optimizer changes"},
                      {.names = names_of(optim::lr_scheduler_registry()),
                       .describe = [](const std::string& name, FieldVisitor& settings) {
                         if (canonical_name(name) != kNone) Scheduler(name).describe(settings);
                       }});
}

void OptimizerChoice::check() const {
  if (!is_none()) static_cast<void>(optimizer_of(optimizer_));
  if (is_none() && !groups_.empty()) {
    throw UsageError("optimizer.groups is set, but there is no optimizer; name one: --optimizer=AdamW");
  }
  if (scheduler_.is(kNone)) return;
  if (is_none()) {
    throw UsageError(
        fmt::format("scheduler is {}, but there is no optimizer; name one: --optimizer=AdamW", scheduler_.name()));
  }
  static_cast<void>(scheduler_of(scheduler_));
}

Optimizers OptimizerChoice::make(const Module& module) const {
  Optimizers optimizers;
  optimizers.add(optimizer_of(optimizer_)->make(groups_of(module, groups_)));
  if (!scheduler_.is(kNone)) optimizers.add_scheduler(scheduler_of(scheduler_));
  return optimizers;
}

}  // namespace fulgur
