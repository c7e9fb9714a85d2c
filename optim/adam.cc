#include "fulgur/optim/adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <cmath>

namespace fulgur::optim {
namespace {

template <class Options>
void describe_options(Options& options, FieldVisitor& visit) {
  constexpr double kBelowOne = 1.0 - 1e-16;
  visit({.name = "lr", .help = "learning rate", .min = 0}, &options.lr);
  visit({.name = "betas", .help = "decay of the means of the gradient and of its square", .min = 0, .max = kBelowOne},
        &options.betas);
  visit({.name = "eps", .help = "number added to the root of the second moment", .min = 0}, &options.eps);
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
    : ElementWiseOptimizer(name, std::move(given_groups), options.lr, options.weight_decay,
                           {{.name = "exp_avg", .slot = 0}, {.name = "exp_avg_sq", .slot = 1}}),
      betas_(options.betas),
      eps_(options.eps),
      decay_(decay) {}

Rule AdamBase::rule(const Group& group, int64_t num_updates) const {
  const auto t = static_cast<double>(num_updates);
  return AdamRule{
      .one_minus_beta1 = 1.0 - betas_.first,
      .one_minus_beta2 = 1.0 - betas_.second,
      .eps = eps_,
      .step_size = group.lr / (1.0 - std::pow(betas_.first, t)),
      .inv_root_bias_correction2 = 1.0 / std::sqrt(1.0 - std::pow(betas_.second, t)),
      .l2 = decay_ == Decay::l2 ? group.weight_decay : 0.0,
      .decay = decay_ == Decay::decoupled ? group.lr * group.weight_decay : 0.0,
  };
}

void AdamBase::update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                                 const std::optional<at::Tensor>& gradient_divisor) {
  const auto update = [&](auto kernel) {
    kernel(lists.params, lists.grads, lists.states[0], lists.states[1], at::TensorList(),
           lists.repeated(static_cast<double>(num_updates)), group.lr, betas_.first, betas_.second, group.weight_decay,
           eps_, /*amsgrad=*/false, /*maximize=*/false, gradient_divisor, /*found_inf=*/std::nullopt);
  };
  if (decay_ == Decay::l2) {
    update([](const auto&... arguments) { at::_fused_adam_(arguments...); });
  } else {
    update([](const auto&... arguments) { at::_fused_adamw_(arguments...); });
  }
}

}  // namespace internal

Adam::Adam(std::vector<at::Tensor> params, AdamOptions options) : Adam(one_group(std::move(params)), options) {}
Adam::Adam(std::vector<ParamGroup> groups, AdamOptions options)
    : AdamBase("Adam", std::move(groups), checked(options), Decay::l2) {}

AdamW::AdamW(std::vector<at::Tensor> params, AdamWOptions options) : AdamW(one_group(std::move(params)), options) {}
AdamW::AdamW(std::vector<ParamGroup> groups, AdamWOptions options)
    : AdamBase("AdamW", std::move(groups), checked(options), Decay::decoupled) {}

}  // namespace fulgur::optim
