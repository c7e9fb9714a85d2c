#pragma once

#include <string>

#include "fulgur/core/run_state.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// Sets libtorch's process-wide switches for `deterministic`, `benchmark`, `float32_matmul_precision` and, in fit,
// `detect_anomaly`. The destructor restores only the switches that were set, because a Trainer in another thread may
// have set the others. Where there is a GPU, deterministic also sets CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads at its
// first use, if it is unset.
class ScopedDebugModes {
 public:
  ScopedDebugModes(const TrainerOptions& options, EntryPoint entry_point);
  ~ScopedDebugModes();
  ScopedDebugModes(const ScopedDebugModes&) = delete;
  ScopedDebugModes& operator=(const ScopedDebugModes&) = delete;

 private:
  const bool sets_deterministic_, sets_benchmark_, sets_anomaly_;
  const bool was_deterministic_, was_warn_only_, was_benchmark_;
  const std::string was_matmul_precision_;  // empty: not set here
  const bool was_detecting_, was_checking_nan_;
};

}  // namespace fulgur
