#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "optim/loss_scaler.h"

namespace fulgur {

// A loss scale over the optimizers of a run. Any backward may give gradients to any optimizer, and they must be stepped
// with the scale that they were made with: so the scale moves only while no optimizer has gradients waiting, once for
// all steps since it last did. With one optimizer that is after each step, as GradScaler has it.
// Threading: the training thread only.
class LossScaling {
 public:
  explicit LossScaling(size_t num_optimizers, optim::LossScalerOptions options = {})
      : scaler_(options), gradients_(num_optimizers) {}

  at::Tensor scale(const at::Tensor& loss);  // for backward
  void zeroed(size_t optimizer);             // its gradients were dropped

  // Whether a gradient is infinite or NaN, so that there must be no step. Remembers it for stepped(), also over what
  // hooks do to the gradients after unscaled(). Waits for their device.
  bool is_non_finite(size_t optimizer, const std::function<bool()>& any_non_finite);

  // What makes the gradients those of the loss: 1 if unscaled() said that they are already.
  double factor(size_t optimizer) const;
  void unscaled(size_t optimizer) { gradients_[optimizer].unscaled = true; }

  void stepped(size_t optimizer);  // or skipped, as is_non_finite() said
  double loss_scale() const { return scaler_.loss_scale(); }

  // Between steps of all optimizers.
  optim::LossScalerState state() const { return scaler_.state(); }
  void load_state(const optim::LossScalerState& state) { scaler_.load_state(state); }

 private:
  struct Gradients {  // of one optimizer
    bool waiting = false;
    bool unscaled = false;
    std::optional<bool> non_finite{};
  };
  void move_if_none_waits();

  optim::LossScaler scaler_;
  std::vector<Gradients> gradients_;
  std::optional<bool> found_inf_{};  // in any step since the scale last moved; unset if there was none
};

}  // namespace fulgur
