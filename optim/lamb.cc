#include "fulgur/optim/lamb.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/whole_tensor.h"

namespace fulgur::optim {
namespace {

LAMBOptions checked(LAMBOptions options) {
  check_fields("LAMB", options);
  return options;
}

}  // namespace

void LAMBOptions::describe(FieldVisitor& visit) {
  constexpr double kBelowOne = 1.0 - 1e-16;
  visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  visit({.name = "betas", .help = "decay of the means of the gradient and of its square", .min = 0, .max = kBelowOne},
        &betas);
  visit({.name = "eps", .help = "number added to the root of the second moment", .min = 0}, &eps);
  visit({.name = "weight_decay", .help = "weight decay", .min = 0}, &weight_decay);
}

LAMB::LAMB(std::vector<at::Tensor> params, LAMBOptions options) : LAMB(one_group(std::move(params)), options) {}

LAMB::LAMB(std::vector<ParamGroup> given_groups, LAMBOptions options)
    : Optimizer("LAMB", std::move(given_groups), options.lr, options.weight_decay), options_(checked(options)) {}

void LAMB::step(const GradientTransform& transform) {
  const c10::NoGradGuard no_grad;
  for (size_t g = 0; g < groups().size(); ++g) {
    const Group& group = groups()[g];
    for (size_t i = 0; i < group.params.size(); ++i) {
      const at::Tensor& param = group.params[i];
      if (!param.grad().defined()) continue;
      const at::Tensor update =
          direction(param, transformed_gradient(param, transform), state_of(g, i), group.weight_decay);
      param.sub_(update.mul(ratio_or_one(joint_norm({param}), joint_norm({update}))), group.lr);
    }
  }
}

LAMB::State& LAMB::state_of(size_t group, size_t index) {
  for (size_t g = states_.size(); g < groups().size(); ++g) states_.emplace_back(groups()[g].params.size());
  return states_[group][index];
}

ParameterState LAMB::parameter_state(size_t group, size_t index) {
  const State& own = state_of(group, index);
  if (own.num_updates == 0) return {};
  return {.num_updates = own.num_updates, .tensors = {{"exp_avg", own.exp_avg}, {"exp_avg_sq", own.exp_avg_sq}}};
}

void LAMB::load_parameter_state(size_t group, size_t index, const ParameterState& state) {
  State& own = state_of(group, index);
  own = {.exp_avg = {}, .exp_avg_sq = {}, .num_updates = state.num_updates};
  if (own.num_updates == 0) return;
  const c10::Device device = groups()[group].params[index].device();
  own.exp_avg = copy_of(state.tensor("exp_avg"), device);
  own.exp_avg_sq = copy_of(state.tensor("exp_avg_sq"), device);
}

at::Tensor LAMB::direction(const at::Tensor& param, at::Tensor grad, State& state, double weight_decay) const {
  const auto [beta1, beta2] = options_.betas;
  if (state.num_updates++ == 0) {  // in the memory order of the parameter, which a checkpoint expects
    state.exp_avg = at::zeros_like(param, grad.options());
    state.exp_avg_sq = at::zeros_like(param, grad.options());
  }
  state.exp_avg.lerp_(grad, 1.0 - beta1);
  state.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, 1.0 - beta2);
  const auto t = static_cast<double>(state.num_updates);
  const at::Tensor root = state.exp_avg_sq.sqrt().div_(std::sqrt(1.0 - std::pow(beta2, t))).add_(options_.eps);
  return state.exp_avg.div(root).div_(1.0 - std::pow(beta1, t)).add_(param, weight_decay);
}

}  // namespace fulgur::optim
