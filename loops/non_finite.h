#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "fulgur/core/metric_log.h"
#include "fulgur/core/run_state.h"

namespace fulgur {

// Warns of a loss or a metric that is NaN or infinite, once in a run for each name. Looks only at numbers that are on
// the host anyway, so that no step waits for the accelerator: metrics on their way to the loggers, and losses on the
// CPU. Threading: the training thread.
class NonFinite {
 public:
  explicit NonFinite(bool active) : active_(active) {}

  void look_at(const Metrics& metrics, int64_t step, const RunState& state);
  void look_at_loss(const at::Tensor& loss, const RunState& state);  // as training_step returned it; may be undefined

 private:
  void warn(std::string_view name, double value, int64_t step, const RunState& state);

  const bool active_;
  std::set<std::string, std::less<>> warned_;
};

}  // namespace fulgur
