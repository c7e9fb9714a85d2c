#pragma once

#include <string>

#include "fulgur/core/run_state.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// Sets libtorch's process-wide switches for `deterministic`, `benchmark`, `float32_matmul_precision` and, in fit,
// `detect_anomaly`. The destructor restores only the switches that were set, because a Trainer in another thread may
// have set the others. On a machine with a GPU, `deterministic` also sets the variable CUBLAS_WORKSPACE_CONFIG if the
// variable is unset; cuBLAS reads it at its first use.
class ScopedDebugModes {
 public:
  ScopedDebugModes(const TrainerOptions& options, EntryPoint entry_point);
  ~ScopedDebugModes();
  ScopedDebugModes(const ScopedDebugModes&) = delete;
  ScopedDebugModes& operator=(const ScopedDebugModes&) = delete;

 private:
  const bool sets_deterministic_, sets_benchmark_, sets_anomaly_;
  const bool was_deterministic_, was_warn_only_, was_benchmark_;
  const std::string was_matmul_precision_;  // empty: this object does not change the precision
  const bool was_detecting_, was_checking_nan_;
};

}  // namespace fulgur
