#pragma once

#include <cstdint>
#include <memory>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct GradientNormMonitorOptions {
  bool prog_bar = false;  // show it in the progress line
  void describe(FieldVisitor& visit);
};

// Logs `grad_norm`, the 2-norm of the mean gradient over all ranks before it is clipped, at every optimizer step. Costs
// nothing where gradients are clipped by norm anyway, otherwise one pass over them. With several optimizers: the norm
// of the one that stepped last. Steps that were skipped log nothing.
class GradientNormMonitor final : public Callback {
 public:
  using Options = GradientNormMonitorOptions;
  explicit GradientNormMonitor(Options options = {}) : options_(options) {}
  static std::shared_ptr<GradientNormMonitor> make(Options options = {});

  bool wants_grad_norm() const override { return true; }
  BatchAction on_train_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;

 private:
  Options options_;
  int64_t step_before_ = 0;  // global_step when the batch began
};

}  // namespace fulgur
