#include "fulgur/trainer/debug_modes.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <cstdlib>
#include <string_view>

#include "fulgur/base/names.h"

namespace fulgur {

using torch::autograd::AnomalyMode;

namespace {

constexpr std::string_view kUnset = "unset";

std::string matmul_precision() {
  switch (at::globalContext().float32MatmulPrecision()) {
    case at::Float32MatmulPrecision::HIGHEST:
      return "highest";
    case at::Float32MatmulPrecision::HIGH:
      return "high";
    case at::Float32MatmulPrecision::MEDIUM:
      return "medium";
  }
  return "highest";
}

}  // namespace

ScopedDebugModes::ScopedDebugModes(const TrainerOptions& options, EntryPoint entry_point)
    : sets_deterministic_(options.deterministic),
      sets_benchmark_(options.deterministic || options.benchmark),
      sets_anomaly_(options.detect_anomaly && entry_point == EntryPoint::fit),
      was_deterministic_(at::globalContext().deterministicAlgorithms()),
      was_warn_only_(at::globalContext().deterministicAlgorithmsWarnOnly()),
      was_benchmark_(at::globalContext().benchmarkCuDNN()),
      was_matmul_precision_(canonical_name(options.float32_matmul_precision) == kUnset ? "" : matmul_precision()),
      was_detecting_(AnomalyMode::is_enabled()),
      was_checking_nan_(AnomalyMode::should_check_nan()) {
  if (sets_deterministic_) {
    if (at::globalContext().hasCUDA()) ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
  if (sets_benchmark_) at::globalContext().setBenchmarkCuDNN(options.benchmark.value_or(false));
  if (!was_matmul_precision_.empty()) {
    at::globalContext().setFloat32MatmulPrecision(canonical_name(options.float32_matmul_precision));
  }
  if (sets_anomaly_) AnomalyMode::set_enabled(true, /*check_nan=*/true);
}

ScopedDebugModes::~ScopedDebugModes() {
  if (sets_deterministic_) at::globalContext().setDeterministicAlgorithms(was_deterministic_, was_warn_only_);
  if (sets_benchmark_) at::globalContext().setBenchmarkCuDNN(was_benchmark_);
  if (!was_matmul_precision_.empty()) at::globalContext().setFloat32MatmulPrecision(was_matmul_precision_);
  if (sets_anomaly_) AnomalyMode::set_enabled(was_detecting_, was_checking_nan_);
}

}  // namespace fulgur
