#include "optim/adam.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "optim/gradient_divisor.h"

namespace fulgur::optim {
namespace {

template <class Options>
void describe_options(Options& options, FieldVisitor& visit) {
  constexpr double kBelowOne = 1.0 - 1e-16;
  visit({.name = "lr", .help = "learning rate", .min = 0}, &options.lr);
  visit({.name = "beta1", .help = "decay of the mean of the gradient", .min = 0, .max = kBelowOne},
        &options.betas.first);
  visit({.name = "beta2", .help = "decay of the mean of its square", .min = 0, .max = kBelowOne},
        &options.betas.second);
  visit({.name = "eps", .help = "added to the root of the second mean", .min = 0}, &options.eps);
  visit({.name = "weight_decay", .help = "weight decay", .min = 0}, &options.weight_decay);
}

AdamOptions checked(AdamOptions options) {
  check_fields("Adam", options);
  return options;
}

AdamOptions checked(AdamWOptions options) {
  check_fields("AdamW", options);
  return {.lr = options.lr, .betas = options.betas, .eps = options.eps, .weight_decay = options.weight_decay};
}

}  // namespace

void AdamOptions::describe(FieldVisitor& visit) { describe_options(*this, visit); }
void AdamWOptions::describe(FieldVisitor& visit) { describe_options(*this, visit); }

namespace internal {

AdamBase::AdamBase(std::string_view name, std::vector<ParamGroup> given_groups, const AdamOptions& options, Decay decay)
    : Optimizer(name, std::move(given_groups), options.lr, options.weight_decay),
      betas_(options.betas),
      eps_(options.eps),
      decay_(decay) {
  for (const Group& group : groups()) states_.emplace_back(group.params.size());
}

void AdamBase::KernelArguments::clear() {
  for (auto* list : {&params, &grads, &exp_avgs, &exp_avg_sqs, &num_updates}) list->clear();
}

void AdamBase::collect(size_t group_index) {
  arguments_.clear();
  const std::vector<at::Tensor>& params = groups()[group_index].params;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    if (!param.grad().defined()) continue;
    State& state = states_[group_index][i];
    if (!state.exp_avg.defined()) {
      state = {at::zeros_like(param), at::zeros_like(param), at::zeros({}, param.options().dtype(at::kFloat))};
    }
    arguments_.params.push_back(param);
    arguments_.grads.push_back(param.grad());
    arguments_.exp_avgs.push_back(state.exp_avg);
    arguments_.exp_avg_sqs.push_back(state.exp_avg_sq);
    arguments_.num_updates.push_back(state.num_updates);
  }
}

void AdamBase::step(const GradientTransform& transform) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Tensor> divisor = gradient_divisor(transform, *this);
  for (size_t i = 0; i < groups().size(); ++i) {
    collect(i);
    auto& [params, grads, exp_avgs, exp_avg_sqs, num_updates] = arguments_;
    if (params.empty()) continue;
    const Group& group = groups()[i];
    at::_foreach_add_(num_updates, 1);
    if (decay_ == Decay::l2) {
      at::_fused_adam_(params, grads, exp_avgs, exp_avg_sqs, {}, num_updates, group.lr, betas_.first, betas_.second,
                       group.weight_decay, eps_, /*amsgrad=*/false, /*maximize=*/false, divisor);
    } else {
      at::_fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, {}, num_updates, group.lr, betas_.first, betas_.second,
                        group.weight_decay, eps_, /*amsgrad=*/false, /*maximize=*/false, divisor);
    }
  }
  arguments_.clear();  // gradients are not kept alive
}

}  // namespace internal

Adam::Adam(std::vector<at::Tensor> params, AdamOptions options) : Adam(one_group(std::move(params)), options) {}
Adam::Adam(std::vector<ParamGroup> groups, AdamOptions options)
    : AdamBase("Adam", std::move(groups), checked(options), Decay::l2) {}

AdamW::AdamW(std::vector<at::Tensor> params, AdamWOptions options) : AdamW(one_group(std::move(params)), options) {}
AdamW::AdamW(std::vector<ParamGroup> groups, AdamWOptions options)
    : AdamBase("AdamW", std::move(groups), checked(options), Decay::decoupled) {}

}  // namespace fulgur::optim
