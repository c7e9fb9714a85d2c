#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct DeviceStatsMonitorOptions {
  double refresh_s = 1.0;  // shortest time between two queries of the system; 0: query at every step

  void describe(FieldVisitor& visit);
};

// Logs at every step what the process uses of its machine. Each rank logs its own values; loggers show those of rank 0:
//   device/host_rss_mib         memory of the process
//   device/host_available_mib   memory of the machine that new work could have
//   device/host_cpu_percent     computing time of all threads since the last look; 100: one core
// and, on an accelerator, from torch's caching allocator:
//   device/allocated_mib, device/allocated_peak_mib, device/reserved_mib
// Throws UsageError for a negative interval.
class DeviceStatsMonitor final : public Callback {
 public:
  using Options = DeviceStatsMonitorOptions;

  explicit DeviceStatsMonitor(Options options = {});
  static std::shared_ptr<DeviceStatsMonitor> make(Options options = {});

  void on_train_start(TrainerControl& trainer) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;

 private:
  using Clock = std::chrono::steady_clock;
  void look(c10::Device device);

  const Options options_;
  Metrics stats_{};
  Clock::time_point looked_at_{};
  double cpu_s_ = 0.0;  // at looked_at_
};

}  // namespace fulgur
