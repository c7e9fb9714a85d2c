#include "fulgur/optim/lars.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/whole_tensor.h"

namespace fulgur::optim {
namespace {

LARSOptions checked(LARSOptions options) {
  check_fields("LARS", options);
  return options;
}

}  // namespace

void LARSOptions::describe(FieldVisitor& visit) {
  visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  visit({.name = "momentum", .help = "decay of the running sum of scaled gradients", .min = 0}, &momentum);
  visit({.name = "weight_decay", .help = "L2 penalty, added to the gradient", .min = 0}, &weight_decay);
  visit({.name = "trust_coefficient", .help = "norm of a step at lr = 1, as a fraction of the tensor's norm", .min = 0},
        &trust_coefficient);
  visit({.name = "eps", .help = "number added to the denominator of a gradient's scale", .min = 0}, &eps);
}

LARS::LARS(std::vector<at::Tensor> params, LARSOptions options) : LARS(one_group(std::move(params)), options) {}

LARS::LARS(std::vector<ParamGroup> given_groups, LARSOptions options)
    : Optimizer("LARS", std::move(given_groups), options.lr, options.weight_decay), options_(checked(options)) {}

void LARS::step(const GradientTransform& transform) {
  const c10::NoGradGuard no_grad;
  for (size_t g = 0; g < groups().size(); ++g) {
    const Group& group = groups()[g];
    for (size_t i = 0; i < group.params.size(); ++i) {
      const at::Tensor& param = group.params[i];
      if (!param.grad().defined()) continue;
      at::Tensor& buffer = momentum_buffer(g, i);
      const at::Tensor grad = scaled_gradient(param, transformed_gradient(param, transform), group.weight_decay);
      if (!buffer.defined()) buffer = at::zeros_like(param, grad.options());  // as a checkpoint expects it
      param.sub_(buffer.mul_(options_.momentum).add_(grad), group.lr);
    }
  }
}

at::Tensor& LARS::momentum_buffer(size_t group, size_t index) {
  for (size_t g = momentum_buffers_.size(); g < groups().size(); ++g) {
    momentum_buffers_.emplace_back(groups()[g].params.size());
  }
  return momentum_buffers_[group][index];
}

// LARS does not count updates: a parameter with a buffer had at least one.
ParameterState LARS::parameter_state(size_t group, size_t index) {
  const at::Tensor& buffer = momentum_buffer(group, index);
  if (!buffer.defined()) return {};
  return {.num_updates = 1, .tensors = {{"momentum_buffer", buffer}}};
}

void LARS::load_parameter_state(size_t group, size_t index, const ParameterState& state) {
  at::Tensor& buffer = momentum_buffer(group, index);
  buffer.reset();
  if (state.num_updates > 0) {
    buffer = copy_of(state.tensor("momentum_buffer"), groups()[group].params[index].device());
  }
}

at::Tensor LARS::scaled_gradient(const at::Tensor& param, const at::Tensor& grad, double weight_decay) const {
  const at::Tensor param_norm = joint_norm({param}), grad_norm = joint_norm({grad});
  const at::Tensor divisor = grad_norm.add(param_norm, weight_decay).add_(options_.eps);
  const at::Tensor ratio = ratio_or_one(param_norm.mul(options_.trust_coefficient), divisor.mul_(grad_norm.ne(0)));
  return grad.add(param, weight_decay).mul_(ratio);
}

}  // namespace fulgur::optim
