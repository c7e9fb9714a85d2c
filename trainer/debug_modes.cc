#include "fulgur/trainer/debug_modes.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <cstdlib>

namespace fulgur {

using torch::autograd::AnomalyMode;

ScopedDebugModes::ScopedDebugModes(const TrainerOptions& options, EntryPoint entry_point)
    : sets_deterministic_(options.deterministic),
      sets_anomaly_(options.detect_anomaly && entry_point == EntryPoint::fit),
      was_deterministic_(at::globalContext().deterministicAlgorithms()),
      was_warn_only_(at::globalContext().deterministicAlgorithmsWarnOnly()),
      was_benchmark_(at::globalContext().benchmarkCuDNN()),
      was_detecting_(AnomalyMode::is_enabled()),
      was_checking_nan_(AnomalyMode::should_check_nan()) {
  if (sets_deterministic_) {
    if (at::globalContext().hasCUDA()) ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setBenchmarkCuDNN(false);
  }
  if (sets_anomaly_) AnomalyMode::set_enabled(true, /*check_nan=*/true);
}

ScopedDebugModes::~ScopedDebugModes() {
  if (sets_deterministic_) {
    at::globalContext().setDeterministicAlgorithms(was_deterministic_, was_warn_only_);
    at::globalContext().setBenchmarkCuDNN(was_benchmark_);
  }
  if (sets_anomaly_) AnomalyMode::set_enabled(was_detecting_, was_checking_nan_);
}

}  // namespace fulgur
