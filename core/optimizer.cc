#include "fulgur/core/optimizer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>
#include <unordered_map>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

void check_not_negative(std::string_view optimizer, std::string_view setting, double value) {
  if (!(value >= 0.0)) throw UsageError(fmt::format("{}: {} must be at least 0; got {}", optimizer, setting, value));
}

}  // namespace

const at::Tensor& ParameterState::tensor(std::string_view name) const {
  const auto found = tensors.find(name);
  if (found != tensors.end()) return found->second;
  throw CheckpointError(
      fmt::format("the saved state of an optimizer has no '{}', but {}; was it another optimizer?", name,
                  tensors.empty() ? "nothing" : fmt::format("{}", fmt::join(std::views::keys(tensors), ", "))));
}

std::vector<ParamGroup> one_group(std::vector<at::Tensor> params) {
  std::vector<ParamGroup> groups(1);
  groups.front().params = std::move(params);
  return groups;
}

Optimizer::Optimizer(std::string_view name, std::vector<ParamGroup> groups, double lr, double weight_decay)
    : name_(name), default_lr_(lr), default_weight_decay_(weight_decay) {
  for (ParamGroup& group : groups) append(std::move(group));
  if (params().empty()) {
    throw UsageError(fmt::format("{}: there is no parameter to update; did the module register any?", name));
  }
}

void Optimizer::add_param_group(ParamGroup group) {
  if (group.params.empty()) throw UsageError(fmt::format("{}: the group to add has no parameter", name_));
  append(std::move(group));
}

void Optimizer::append(ParamGroup given) {
  std::unordered_map<const at::TensorImpl*, size_t> group_of;
  for (size_t i = 0; i < groups_.size(); ++i) {
    for (const at::Tensor& param : groups_[i].params) group_of.emplace(param.unsafeGetTensorImpl(), i);
  }
  Group group{.params = {},
              .lr = given.lr.value_or(default_lr_),
              .weight_decay = given.weight_decay.value_or(default_weight_decay_),
              .name = std::move(given.name)};
  if (!group.name.empty() && std::ranges::count(groups_, group.name, &Group::name) > 0) {
    throw UsageError(fmt::format("{}: two groups have the name '{}'; rename one of them", name_, group.name));
  }
  check_not_negative(name_, "lr", group.lr);
  check_not_negative(name_, "weight_decay", group.weight_decay);
  for (at::Tensor& param : given.params) {
    if (!param.defined()) throw UsageError(fmt::format("{}: a parameter is an undefined tensor", name_));
    if (!param.is_leaf()) {
      throw UsageError(
          fmt::format("{}: a parameter is the result of a computation, so that it never gets a gradient; pass the "
                      "module's parameters()",
                      name_));
    }
    const auto [entry, added] = group_of.emplace(param.unsafeGetTensorImpl(), groups_.size());
    if (entry->second != groups_.size()) {
      throw UsageError(fmt::format("{}: groups {} and {} have a parameter in common; leave it in one of them", name_,
                                   entry->second, groups_.size()));
    }
    if (added) group.params.push_back(std::move(param));
  }
  groups_.push_back(std::move(group));
}

int64_t Optimizer::Group::numel() const {
  int64_t num_elements = 0;
  for (const at::Tensor& param : params) num_elements += param.numel();
  return num_elements;
}

void Optimizer::step(const Closure&) {
  TORCH_INTERNAL_ASSERT(false, name_, " takes its gradients as they are, not from a closure");
}

std::vector<at::Tensor> Optimizer::params() const {
  std::vector<at::Tensor> params;
  for (const Group& group : groups_) params.insert(params.end(), group.params.begin(), group.params.end());
  return params;
}

void Optimizer::zero_grad() {
  for (Group& group : groups_) {
    for (at::Tensor& param : group.params) param.mutable_grad().reset();
  }
}

void Optimizers::add_scheduler(LRSchedulerConfig scheduler) {
  check_scheduler_config(scheduler);
  if (list_.empty()) throw UsageError("a scheduler was added before any optimizer; add the optimizer first");
  if (!schedulers_.empty() && schedulers_.back().optimizer == list_.size() - 1) {
    throw UsageError("an optimizer can have one scheduler; make one of several with ChainedScheduler or SequentialLR");
  }
  schedulers_.push_back({list_.size() - 1, std::move(scheduler)});
}

}  // namespace fulgur
