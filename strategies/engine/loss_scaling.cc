#include "fulgur/strategies/engine/loss_scaling.h"

#include <cmath>
#include <utility>

namespace fulgur {

double LossScaling::factor_for_backward(size_t optimizer) const {
  return gradients_[optimizer].scale ? factor(optimizer) * loss_scale() : 1.0;
}

at::Tensor LossScaling::scale(const at::Tensor& loss) {
  for (Gradients& gradients : gradients_) gradients = {.scale = loss_scale()};
  return scaler_.scale(loss);
}

void LossScaling::zeroed(size_t optimizer) { gradients_[optimizer] = {}; }

bool LossScaling::is_non_finite(size_t optimizer, const std::function<double()>& norm) {
  std::optional<bool>& non_finite = gradients_[optimizer].non_finite;
  if (!non_finite) non_finite = !std::isfinite(norm());
  return *non_finite;
}

double LossScaling::factor(size_t optimizer) const {
  return gradients_[optimizer].unscaled ? 1.0 : 1.0 / loss_scale_of(optimizer);
}

void LossScaling::stepped(size_t optimizer) {
  const bool non_finite = std::exchange(gradients_[optimizer].non_finite, std::nullopt).value_or(false);
  if (loss_scale_of(optimizer) == loss_scale()) scaler_.update(non_finite);
}

}  // namespace fulgur
