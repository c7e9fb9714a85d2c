#include "fulgur/loops/non_finite.h"

#include <cmath>

#include "fulgur/base/logging.h"

namespace fulgur {

void NonFinite::look_at(const Metrics& metrics, int64_t step, const RunState& state) {
  if (!active_) return;
  for (const auto& [name, value] : metrics) {
    if (!std::isfinite(value)) warn(name, value, step, state);
  }
}

void NonFinite::look_at_loss(const at::Tensor& loss, const RunState& state) {
  if (!active_ || !loss.defined() || !loss.is_cpu() || loss.numel() != 1) return;
  const bool is_float = loss.scalar_type() == at::kFloat;  // the usual case, without a trip through the dispatcher
  const double value = is_float ? *loss.const_data_ptr<float>() : loss.item().toDouble();
  if (!std::isfinite(value)) warn("the loss", value, state.batches_that_stepped, state);
}

void NonFinite::warn(std::string_view name, double value, int64_t step, const RunState& state) {
  if (!warned_.emplace(name).second) return;
  log_warning(
      "{} is {} at step {} (epoch {}), and the run continues; detect_anomaly = true finds the operation that it comes "
      "from",
      name,
      std::isnan(value) ? "NaN"
      : value > 0       ? "inf"
                        : "-inf",
      step, state.epoch);
}

}  // namespace fulgur
