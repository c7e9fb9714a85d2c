#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fulgur {

// Bytes that a rank keeps from step to step. Activations come on top.
struct ModelMemory {
  int64_t parameters = 0;                      // frozen ones too
  int64_t gradients = 0;                       // at the end of a window, or while it waits for micro-batches
  std::optional<int64_t> optimizer_state = 0;  // with fp32 masters of 16-bit parameters; unset: not known
  int64_t copies = 0;                          // of parameters, for updates
  int64_t buckets = 0;                         // for gradients on their way, where they do not stay in them
  int64_t on_host = 0;                         // of all these, beside a device that is none

  int64_t total() const { return parameters + gradients + optimizer_state.value_or(0) + copies + buckets; }
};

// A table in MB with a row for each name.
std::string format_memory(const std::vector<std::pair<std::string, ModelMemory>>& rows);

}  // namespace fulgur
