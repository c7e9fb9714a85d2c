#include "optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "core/error.h"
#include "optim/gradient_divisor.h"

namespace fulgur::optim {
namespace {

SGDOptions checked(SGDOptions options) {
  check_fields("SGD", options);
  if (options.nesterov && (options.momentum == 0.0 || options.dampening != 0.0)) {
    throw UsageError("SGD: nesterov needs momentum above 0 and dampening = 0");
  }
  return options;
}

}  // namespace

void SGDOptions::describe(FieldVisitor& visit) {
  visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  visit({.name = "momentum", .help = "of the running sum of gradients", .min = 0}, &momentum);
  visit({.name = "dampening", .help = "a gradient enters the sum times 1 - dampening"}, &dampening);
  visit({.name = "weight_decay", .help = "L2, added to the gradient", .min = 0}, &weight_decay);
  visit({.name = "nesterov", .help = "Nesterov momentum"}, &nesterov);
}

SGD::SGD(std::vector<at::Tensor> params, SGDOptions options) : SGD(one_group(std::move(params)), options) {}

SGD::SGD(std::vector<ParamGroup> given_groups, SGDOptions options)
    : Optimizer("SGD", std::move(given_groups), options.lr, options.weight_decay), options_(checked(options)) {
  for (const Group& group : groups()) momentum_buffers_.emplace_back(group.params.size());
}

void SGD::step(const GradientTransform& transform) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Tensor> divisor = gradient_divisor(transform, *this);
  for (size_t g = 0; g < groups().size(); ++g) {
    const Group& group = groups()[g];
    KernelArguments first, later;  // the kernel fills the momentum buffers of a first step, and adds to them later
    for (size_t i = 0; i < group.params.size(); ++i) {
      const at::Tensor& param = group.params[i];
      if (!param.grad().defined()) continue;
      at::Tensor& buffer = momentum_buffers_[g][i];
      KernelArguments& arguments = options_.momentum != 0.0 && !buffer.defined() ? first : later;
      arguments.params.push_back(param);
      arguments.grads.push_back(param.grad());
      if (options_.momentum == 0.0) continue;
      if (!buffer.defined()) buffer = at::empty_like(param);
      arguments.momentum_buffers.push_back(buffer);
    }
    update(group, first, divisor, /*is_first_step=*/true);
    update(group, later, divisor, /*is_first_step=*/false);
  }
}

void SGD::update(const Group& group, KernelArguments& arguments, const std::optional<at::Tensor>& divisor,
                 bool is_first_step) {
  if (arguments.params.empty()) return;
  at::_fused_sgd_(arguments.params, arguments.grads, arguments.momentum_buffers, group.weight_decay, options_.momentum,
                  group.lr, options_.dampening, options_.nesterov, /*maximize=*/false, is_first_step, divisor);
}

}  // namespace fulgur::optim
