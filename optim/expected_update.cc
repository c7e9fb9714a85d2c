#include "fulgur/optim/expected_update.h"

#include <variant>

namespace fulgur::optim {
namespace {

struct AfterExpectedUpdate {
  const Rule& last;
  const at::Tensor& param;
  const std::array<at::Tensor, kMaxStates>& states;

  at::Tensor operator()(const AdamRule& next) const {
    const auto& of_last = std::get<AdamRule>(last);
    const at::Tensor root = states[1].sqrt().mul_(of_last.inv_root_bias_correction2).add_(of_last.eps);
    const at::Tensor quotient = states[0].div(root);
    return param.mul(1.0 - next.decay).sub_(quotient, next.step_size * (1.0 - next.one_minus_beta1));
  }
  at::Tensor operator()(const SGDRule& next) const {
    if (!states[0].defined()) return param;
    return param.sub(states[0], next.lr * next.momentum * (next.nesterov ? next.momentum : 1.0));
  }
  at::Tensor operator()(const AdagradRule&) const { return param; }
  at::Tensor operator()(const RMSpropRule& next) const {
    return states[1].defined() ? param.sub(states[1], next.lr * next.momentum) : param;
  }
  at::Tensor operator()(const LionRule& next) const {
    return param.mul(1.0 - next.decay).sub_(states[0].sign(), next.lr);
  }
};

}  // namespace

at::Tensor after_expected_update(const Rule& last, const Rule& next, const at::Tensor& param,
                                 const std::array<at::Tensor, kMaxStates>& states) {
  return std::visit(AfterExpectedUpdate{last, param, states}, next);
}

}  // namespace fulgur::optim
