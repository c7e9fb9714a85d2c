#include "fulgur/optim/lion.h"

#include <ATen/ops/lerp.h>

namespace fulgur::optim {
namespace {

LionOptions checked(LionOptions options) {
  check_fields("Lion", options);
  return options;
}

}  // namespace

void LionOptions::describe(FieldVisitor& visit) {
  visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  visit({.name = "betas", .help = "decay of the mean whose sign is the step, and of the kept mean", .min = 0, .max = 1},
        &betas);
  visit({.name = "weight_decay", .help = "decoupled weight decay", .min = 0}, &weight_decay);
}

Lion::Lion(std::vector<at::Tensor> params, LionOptions options) : Lion(one_group(std::move(params)), options) {}

Lion::Lion(std::vector<ParamGroup> given_groups, LionOptions options)
    : ElementWiseOptimizer("Lion", std::move(given_groups), options.lr, options.weight_decay, {{.name = "exp_avg"}}),
      options_(checked(options)) {}

Rule Lion::rule(const Group& group, int64_t /*num_updates*/) const {
  return LionRule{.lr = group.lr,
                  .one_minus_beta1 = 1.0 - options_.betas.first,
                  .one_minus_beta2 = 1.0 - options_.betas.second,
                  .decay = group.lr * group.weight_decay};
}

void Lion::update_with_torch(const Group& group, int64_t /*num_updates*/, const TensorLists& lists,
                             const std::optional<at::Tensor>& gradient_divisor) {
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::Tensor& exp_avg = lists.states[0][i];
    const at::Tensor scaled = gradient_divisor ? lists.grads[i].div(*gradient_divisor) : lists.grads[i];
    const at::Tensor grad = scaled.to(exp_avg.scalar_type());
    const at::Tensor sign = at::lerp(exp_avg, grad, 1.0 - options_.betas.first).sign_();
    lists.params[i].mul_(1.0 - group.lr * group.weight_decay).add_(sign, -group.lr);
    exp_avg.lerp_(grad, 1.0 - options_.betas.second);
  }
}

}  // namespace fulgur::optim
