#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "fulgur/optim/loss_scaler.h"

namespace fulgur {

// A loss scale for all optimizers of a run. Any backward may give gradients to any optimizer, and a step must use the
// scale that its gradients were computed with. So the scale changes only while no optimizer has waiting gradients,
// once for all steps since the last change. With one optimizer it changes after each step, as in GradScaler.
// Threading: the training thread only.
class LossScaling {
 public:
  explicit LossScaling(size_t num_optimizers, optim::LossScalerOptions options = {})
      : scaler_(options), gradients_(num_optimizers) {}

  at::Tensor scale(const at::Tensor& loss);  // the loss to call backward on
  void zeroed(size_t optimizer);             // the optimizer's gradients were dropped

  // Whether a gradient is infinite or NaN, so that the step must be skipped: their norm then is, too. `norm`, which
  // waits for the device, is asked once until stepped(), whatever hooks do to the gradients meanwhile.
  bool is_non_finite(size_t optimizer, const std::function<double()>& norm);

  // The factor that undoes the loss scale in the gradients: 1 after unscaled().
  double factor(size_t optimizer) const;
  void unscaled(size_t optimizer) { gradients_[optimizer].unscaled = true; }

  void stepped(size_t optimizer);  // also after a skipped step
  double loss_scale() const { return scaler_.loss_scale(); }

  // Call these between steps. Gradients that wait are not part of the state, so that it is what it will be once they
  // are dropped.
  optim::LossScalerState state() const;
  void load_state(const optim::LossScalerState& state) { scaler_.load_state(state); }

 private:
  struct Gradients {  // the gradients of one optimizer
    bool waiting = false;
    bool unscaled = false;
    std::optional<bool> non_finite{};
  };
  void move_if_none_waits();

  optim::LossScaler scaler_;
  std::vector<Gradients> gradients_;
  std::optional<bool> found_inf_{};  // in any step since the scale last changed; nullopt: no step yet
};

}  // namespace fulgur
