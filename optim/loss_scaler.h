#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fulgur/base/describe.h"

namespace fulgur::optim {

struct LossScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;      // applied after growth_interval steps with finite gradients
  double backoff_factor = 0.5;     // applied after a step with non-finite gradients
  int64_t growth_interval = 2000;  // steps
  void describe(FieldVisitor& visit);
};

// The state of a LossScaler in a checkpoint.
struct LossScalerState {
  double scale = 0.0;
  int64_t growth_tracker = 0;  // steps with finite gradients since the scale last changed
  bool operator==(const LossScalerState&) const = default;
};

// Multiplies the loss, so that small gradients are not rounded to 0 in fp16, and finds the factor by trial: torch's
// GradScaler, without a pass to unscale. A step is
//   scaler.scale(loss).backward();
//   if (const bool found = any_non_finite(gradients); !found) update, with factor() among its factors;
//   scaler.update(found);
// Options are checked in the constructor: UsageError. Threading: one thread at a time.
// Source: Micikevicius et al. 2018, arXiv:1710.03740.
class LossScaler {
 public:
  explicit LossScaler(LossScalerOptions options = {});

  at::Tensor scale(const at::Tensor& loss) const;  // at least fp32, so that the scale itself does not overflow
  double loss_scale() const { return scale_; }
  double factor() const { return 1.0 / scale_; }  // undoes the scale in the gradients

  // Updates the scale; called after each step, taken or skipped. Throws c10::Error when the scale gets too small:
  // then the loss itself is not finite.
  void update(bool found_inf);

  LossScalerState state() const { return {.scale = scale_, .growth_tracker = growth_tracker_}; }
  void load_state(const LossScalerState& state);  // throws c10::ValueError for an invalid state

 private:
  LossScalerOptions options_;
  float scale_;  // fp32, as in GradScaler
  int64_t growth_tracker_ = 0;
};

// Returns whether an element of a gradient is infinite or NaN. Judges by the joint norm, so that fp64 gradients above
// about 1e154, whose squares overflow, count as infinite. Undefined gradients are left out. Waits for the gradients'
// device.
bool any_non_finite(const std::vector<at::Tensor>& gradients);

}  // namespace fulgur::optim
