#include "fulgur/optim/rmsprop.h"

#include <utility>

namespace fulgur::optim {
namespace {

RMSpropOptions checked(RMSpropOptions options) {
  check_fields("RMSprop", options);
  return options;
}

std::vector<ElementWiseOptimizer::StateField> fields_for(const RMSpropOptions& options) {
  std::vector<ElementWiseOptimizer::StateField> fields{{.name = "square_avg", .slot = 0}};
  if (options.momentum != 0.0) fields.push_back({.name = "momentum_buffer", .slot = 1});
  if (options.centered) fields.push_back({.name = "grad_avg", .slot = 2});
  return fields;
}

}  // namespace

void RMSpropOptions::describe(FieldVisitor& visit) {
  visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  visit({.name = "alpha", .help = "decay of the mean of the squared gradient", .min = 0, .max = 1}, &alpha);
  visit({.name = "eps", .help = "number added to the root of the mean", .min = 0}, &eps);
  visit({.name = "weight_decay", .help = "L2 penalty, added to the gradient", .min = 0}, &weight_decay);
  visit({.name = "momentum", .help = "decay of the running sum of steps", .min = 0}, &momentum);
  visit({.name = "centered", .help = "divide by the deviation from the mean gradient"}, &centered);
}

RMSprop::RMSprop(std::vector<at::Tensor> params, RMSpropOptions options)
    : RMSprop(one_group(std::move(params)), options) {}

RMSprop::RMSprop(std::vector<ParamGroup> given_groups, RMSpropOptions options)
    : ElementWiseOptimizer("RMSprop", std::move(given_groups), options.lr, options.weight_decay, fields_for(options)),
      options_(checked(options)) {}

Rule RMSprop::rule(const Group& group, int64_t /*num_updates*/) const {
  return RMSpropRule{.lr = group.lr,
                     .one_minus_alpha = 1.0 - options_.alpha,
                     .eps = options_.eps,
                     .momentum = options_.momentum,
                     .l2 = group.weight_decay};
}

void RMSprop::update_with_torch(const Group& group, int64_t /*num_updates*/, const TensorLists& lists,
                                const std::optional<at::Tensor>& gradient_divisor) {
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::Tensor& param = lists.params[i];
    const at::Tensor& square_avg = lists.states[0][i];
    at::Tensor grad = gradient_divisor ? lists.grads[i].div(*gradient_divisor) : lists.grads[i];
    grad = grad.to(square_avg.scalar_type()).add(param, group.weight_decay);
    square_avg.mul_(options_.alpha).addcmul_(grad, grad, 1.0 - options_.alpha);
    at::Tensor variance = square_avg;
    if (options_.centered) {
      const at::Tensor& grad_avg = lists.states[2][i];
      grad_avg.lerp_(grad, 1.0 - options_.alpha);
      variance = square_avg.addcmul(grad_avg, grad_avg, -1.0).clamp_min_(0.0);  // below 0 by rounding only
    }
    at::Tensor direction = grad.div_(variance.sqrt().add_(options_.eps));
    if (options_.momentum != 0.0) direction = lists.states[1][i].mul_(options_.momentum).add_(direction);
    param.add_(direction, -group.lr);
  }
}

}  // namespace fulgur::optim
