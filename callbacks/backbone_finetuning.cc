#include "fulgur/callbacks/backbone_finetuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"

namespace fulgur {

void BackboneFinetuningOptions::describe(FieldVisitor& visit) {
  visit({.name = "group", .help = "name of the optimizer's parameter group that is frozen at first"}, &group);
  visit({.name = "unfreeze_at_epoch", .help = "first epoch, counted from 0, that trains the group", .min = 0},
        &unfreeze_at_epoch);
  visit({.name = "initial_lr_ratio",
         .help = "learning rate of the group in its first epoch, relative to its own",
         .max = 1},
        &initial_lr_ratio);
  visit({.name = "lr_growth",
         .help = "factor of the learning rate from each epoch to the next, up to the group's own",
         .min = 1},
        &lr_growth);
}

BackboneFinetuning::BackboneFinetuning(Options options) : options_(std::move(options)) {
  check_fields("BackboneFinetuning", options_);
  if (options_.initial_lr_ratio > 0.0) return;
  throw UsageError(
      fmt::format("BackboneFinetuning: initial_lr_ratio must be above 0; got {}", options_.initial_lr_ratio));
}

std::shared_ptr<BackboneFinetuning> BackboneFinetuning::make(Options options) {
  return std::make_shared<BackboneFinetuning>(std::move(options));
}

void BackboneFinetuning::setup(TrainerControl&, EntryPoint entry_point) {
  if (entry_point != EntryPoint::fit) return;
  is_unfrozen_ = false;
  lr_ratio_ = 1.0;
}

void BackboneFinetuning::on_fit_start(TrainerControl& trainer) {
  check_groups(trainer.optimizers());
  if (is_unfrozen_) return;
  set_trained(trainer.optimizers(), false);
  const int64_t max_epochs = trainer.state().max_epochs;
  if (trainer.is_global_zero() && max_epochs >= 0 && max_epochs <= options_.unfreeze_at_epoch) {
    log_warning(
        "BackboneFinetuning: the group '{}' is never trained, because unfreeze_at_epoch is {} and max_epochs {}",
        options_.group, options_.unfreeze_at_epoch, max_epochs);
  }
}

// Also called when a run resumes in the middle of an epoch, in which nothing is left to do.
void BackboneFinetuning::on_train_epoch_start(TrainerControl& trainer) {
  const int64_t num_epochs = trainer.state().epoch - options_.unfreeze_at_epoch;  // number that have trained the group
  if (num_epochs < 0) return;
  if (!std::exchange(is_unfrozen_, true)) {
    set_trained(trainer.optimizers(), true);
    if (trainer.is_global_zero()) log_info("the group '{}' is trained from this epoch on", options_.group);
  }
  const double ratio =
      std::min(1.0, options_.initial_lr_ratio * std::pow(options_.lr_growth, static_cast<double>(num_epochs)));
  if (ratio == lr_ratio_) return;
  for (size_t i = 0; i < trainer.optimizers().size(); ++i) {
    const std::vector<Optimizer::Group>& groups = std::as_const(trainer.optimizers()[i]).groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      if (groups[g].name == options_.group) trainer.scale_lr(i, g, ratio / lr_ratio_);
    }
  }
  lr_ratio_ = ratio;
}

void BackboneFinetuning::check_groups(const Optimizers& optimizers) const {
  std::vector<std::string> names;
  bool has_others = false;
  for (const auto& optimizer : optimizers) {
    for (const Optimizer::Group& group : optimizer->groups()) {
      if (!group.name.empty()) names.push_back(group.name);
      if (group.name == options_.group) continue;
      has_others |= std::ranges::any_of(group.params, [](const at::Tensor& param) { return param.requires_grad(); });
    }
  }
  if (std::ranges::find(names, options_.group) == names.end()) {
    throw UsageError(fmt::format(
        "BackboneFinetuning: {}; configure_optimizers returns it as {{.params = backbone->parameters(), .name = "
        "\"{}\"}}",
        names.empty() ? fmt::format("no parameter group has a name, and so none is called '{}'", options_.group)
                      : unknown_name_message("parameter group", options_.group, names),
        options_.group));
  }
  if (!has_others && options_.unfreeze_at_epoch > 0) {
    throw UsageError(fmt::format(
        "BackboneFinetuning: there is no parameter to train before epoch {}, because the group '{}' has all of them; "
        "put the head into a group of its own",
        options_.unfreeze_at_epoch, options_.group));
  }
}

void BackboneFinetuning::set_trained(const Optimizers& optimizers, bool is_trained) const {
  for (const auto& optimizer : optimizers) {
    for (const Optimizer::Group& group : optimizer->groups()) {
      if (group.name != options_.group) continue;
      for (at::Tensor param : group.params) param.set_requires_grad(is_trained);
    }
  }
}

State BackboneFinetuning::state() const {
  State state;
  state.set("is_unfrozen", is_unfrozen_);
  state.set("lr_ratio", lr_ratio_);
  return state;
}

void BackboneFinetuning::load_state(const State& state) {
  is_unfrozen_ = state.get<bool>("is_unfrozen");
  lr_ratio_ = state.get<double>("lr_ratio");
}

}  // namespace fulgur
