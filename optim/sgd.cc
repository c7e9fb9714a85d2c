#include "fulgur/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <utility>

#include "fulgur/base/error.h"

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
  visit({.name = "momentum", .help = "decay of the running sum of gradients", .min = 0}, &momentum);
  visit({.name = "dampening", .help = "damps a gradient in the sum: it enters times 1 - dampening"}, &dampening);
  visit({.name = "weight_decay", .help = "L2 penalty, added to the gradient", .min = 0}, &weight_decay);
  visit({.name = "nesterov", .help = "use Nesterov momentum"}, &nesterov);
}

SGD::SGD(std::vector<at::Tensor> params, SGDOptions options) : SGD(one_group(std::move(params)), options) {}

SGD::SGD(std::vector<ParamGroup> given_groups, SGDOptions options)
    : ElementWiseOptimizer(
          "SGD", std::move(given_groups), options.lr, options.weight_decay,
          options.momentum != 0.0 ? std::vector<StateField>{{.name = "momentum_buffer"}} : std::vector<StateField>{}),
      options_(checked(options)) {}

Rule SGD::rule(const Group& group, int64_t num_updates) const {
  return SGDRule{.lr = group.lr,
                 .momentum = options_.momentum,
                 .one_minus_dampening = num_updates == 1 ? 1.0 : 1.0 - options_.dampening,
                 .l2 = group.weight_decay,
                 .nesterov = options_.nesterov};
}

void SGD::update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                            const std::optional<at::Tensor>& gradient_divisor) {
  at::_fused_sgd_(lists.params, lists.grads, lists.states[0], group.weight_decay, options_.momentum, group.lr,
                  options_.dampening, options_.nesterov, /*maximize=*/false, /*is_first_step=*/num_updates == 1,
                  gradient_divisor);
}

}  // namespace fulgur::optim
