#include "fulgur/optim/adagrad.h"

#include <ATen/ops/_fused_adagrad.h>

#include <utility>

namespace fulgur::optim {
namespace {

AdagradOptions checked(AdagradOptions options) {
  check_fields("Adagrad", options);
  return options;
}

}  // namespace

void AdagradOptions::describe(FieldVisitor& visit) {
  visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  visit({.name = "lr_decay", .help = "decay of the learning rate per update", .min = 0}, &lr_decay);
  visit({.name = "weight_decay", .help = "L2 penalty, added to the gradient", .min = 0}, &weight_decay);
  visit({.name = "initial_accumulator_value", .help = "start of the sum of squared gradients", .min = 0},
        &initial_accumulator_value);
  visit({.name = "eps", .help = "number added to the root of the sum of squared gradients", .min = 0}, &eps);
}

Adagrad::Adagrad(std::vector<at::Tensor> params, AdagradOptions options)
    : Adagrad(one_group(std::move(params)), options) {}

Adagrad::Adagrad(std::vector<ParamGroup> given_groups, AdagradOptions options)
    : ElementWiseOptimizer("Adagrad", std::move(given_groups), options.lr, options.weight_decay,
                           {{.name = "sum", .initial = options.initial_accumulator_value}}),
      options_(checked(options)) {}

Rule Adagrad::rule(const Group& group, int64_t num_updates) const {
  return AdagradRule{.lr = group.lr / (1.0 + static_cast<double>(num_updates - 1) * options_.lr_decay),
                     .eps = options_.eps,
                     .l2 = group.weight_decay};
}

void Adagrad::update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                                const std::optional<at::Tensor>& gradient_divisor) {
  at::_fused_adagrad_(lists.params, lists.grads, lists.states[0], lists.repeated(static_cast<double>(num_updates)),
                      group.lr, options_.lr_decay, group.weight_decay, options_.eps, /*maximize=*/false,
                      gradient_divisor);
}

}  // namespace fulgur::optim
