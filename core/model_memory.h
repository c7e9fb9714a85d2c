#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fulgur {

// Bytes that a rank keeps from step to step, without activations.
struct ModelMemory {
  int64_t parameters = 0;                      // with frozen parameters
  int64_t gradients = 0;                       // waiting for the update, plus sums waiting for further micro-batches
  std::optional<int64_t> optimizer_state = 0;  // with fp32 masters of 16-bit parameters; unset: not known
  int64_t copies = 0;                          // copies of parameters for updates, and their average
  int64_t buckets = 0;                         // for gradients in transit; 0 if gradients stay in the buckets
  int64_t on_host = 0;                         // part of the above in host memory; 0 if the device is the CPU

  int64_t total() const { return parameters + gradients + optimizer_state.value_or(0) + copies + buckets; }
};

// A table in MB with a row for each name.
std::string format_memory(const std::vector<std::pair<std::string, ModelMemory>>& rows);

}  // namespace fulgur
