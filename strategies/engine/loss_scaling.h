#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "fulgur/optim/loss_scaler.h"

namespace fulgur {

// One loss scale for all optimizers of a run. It changes after each step, as in GradScaler. A backward may give
// gradients to every optimizer, and another one may step first, so that this class remembers which scale is in the
// gradients of each optimizer.
// Threading: the training thread only.
class LossScaling {
 public:
  explicit LossScaling(size_t num_optimizers, optim::LossScalerOptions options = {})
      : scaler_(options), gradients_(num_optimizers) {}

  // By how much the optimizer's gradients must be multiplied before the next backward adds to them: they may have been
  // unscaled, or the scale has changed since they were computed.
  double factor_for_backward(size_t optimizer) const;

  at::Tensor scale(const at::Tensor& loss);  // the loss to call backward on
  void zeroed(size_t optimizer);             // the optimizer's gradients were dropped

  // Whether a gradient is infinite or NaN, so that the step must be skipped: their norm then is, too. `norm`, which
  // waits for the device, is asked once until the next scale() or stepped(), whatever hooks do to the gradients
  // meanwhile.
  bool is_non_finite(size_t optimizer, const std::function<double()>& norm);

  // The factor that undoes the loss scale in the gradients: 1 after unscaled().
  double factor(size_t optimizer) const;
  void unscaled(size_t optimizer) { gradients_[optimizer].unscaled = true; }

  // Updates the scale after a step, taken or skipped. Gradients that were computed with another scale do not judge the
  // present one, so that an overflow in the gradients of two optimizers reduces it once.
  void stepped(size_t optimizer);
  double loss_scale() const { return scaler_.loss_scale(); }
  double loss_scale_of(size_t optimizer) const {  // the scale when its gradients were computed
    return gradients_[optimizer].scale.value_or(loss_scale());
  }

  optim::LossScalerState state() const { return scaler_.state(); }
  void load_state(const optim::LossScalerState& state) { scaler_.load_state(state); }

 private:
  struct Gradients {              // the gradients of one optimizer
    std::optional<double> scale;  // in the last backward; nullopt: none since they were dropped
    bool unscaled = false;
    std::optional<bool> non_finite{};
  };

  optim::LossScaler scaler_;
  std::vector<Gradients> gradients_;
};

}  // namespace fulgur
