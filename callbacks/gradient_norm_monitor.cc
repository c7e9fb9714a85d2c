#include "fulgur/callbacks/gradient_norm_monitor.h"

namespace fulgur {

void GradientNormMonitorOptions::describe(FieldVisitor& visit) {
  visit({.name = "prog_bar", .help = "show the norm in the progress line"}, &prog_bar);
}

std::shared_ptr<GradientNormMonitor> GradientNormMonitor::make(Options options) {
  return std::make_shared<GradientNormMonitor>(options);
}

BatchAction GradientNormMonitor::on_train_batch_start(TrainerControl& trainer, const Batch&, int64_t) {
  step_before_ = trainer.state().global_step;
  return BatchAction::run;
}

void GradientNormMonitor::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const RunState& state = trainer.state();
  if (state.global_step == step_before_ || !state.step_report.grad_norm.defined()) return;
  trainer.metrics().log("grad_norm", state.step_report.grad_norm,
                        {.prog_bar = options_.prog_bar, .on_step = true, .on_epoch = false, .batch_size = 1});
}

}  // namespace fulgur
