#include "fulgur/strategies/engine/loss_scaling.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace fulgur {

at::Tensor LossScaling::scale(const at::Tensor& loss) {
  for (Gradients& gradients : gradients_) gradients.waiting = true;
  return scaler_.scale(loss);
}

void LossScaling::zeroed(size_t optimizer) {
  gradients_[optimizer] = {};
  move_if_none_waits();
}

bool LossScaling::is_non_finite(size_t optimizer, const std::function<double()>& norm) {
  std::optional<bool>& non_finite = gradients_[optimizer].non_finite;
  if (!non_finite) non_finite = !std::isfinite(norm());
  return *non_finite;
}

double LossScaling::factor(size_t optimizer) const { return gradients_[optimizer].unscaled ? 1.0 : scaler_.factor(); }

void LossScaling::stepped(size_t optimizer) {
  const Gradients gradients = std::exchange(gradients_[optimizer], {});
  found_inf_ = found_inf_.value_or(false) || gradients.non_finite.value_or(false);
  move_if_none_waits();
}

optim::LossScalerState LossScaling::state() const {
  optim::LossScaler scaler = scaler_;
  if (found_inf_) scaler.update(*found_inf_);
  return scaler.state();
}

void LossScaling::move_if_none_waits() {
  if (!found_inf_ || std::ranges::any_of(gradients_, &Gradients::waiting)) return;
  scaler_.update(*std::exchange(found_inf_, std::nullopt));
}

}  // namespace fulgur
