#pragma once

#include <ATen/core/Tensor.h>

namespace fulgur {

// The outcome of one optimizer step.
struct StepReport {
  // Nothing was changed: the gradients were not finite at the loss scale, a callback did not accept the update, or the
  // Module left it out.
  bool skipped = false;
  double loss_scale = 1.0;

  // The 2-norm of the optimizer's mean gradient over all ranks, before it is clipped; fp64, 0-dim, on the gradients'
  // device. Undefined if the step did not need it: without clipping by norm or a callback that wants_grad_norm(), and
  // for an optimizer that evaluates the loss itself (LBFGS).
  at::Tensor grad_norm{};
};

}  // namespace fulgur
