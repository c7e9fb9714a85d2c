#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "distributed/world.h"
#include "strategies/flat_parameters.h"
#include "strategies/preset_options.h"

namespace fulgur {

using Preset = std::variant<SingleDevice, Dp, Ddp, DdpSharded, ZeroOffload, DelayedUpdate>;

// What a preset asks of FlatStrategy.
struct EngineOptions {
  std::optional<WorldOptions> world{};  // with a rank for each device
  BucketOptions buckets{};
  bool broadcast_buffers = false;
  bool shard = false;             // a rank updates its ranges only
  bool each_micro_batch = false;  // gradients are reduced then, and not only once a window
  double host_ratio = 0;
  bool delayed = false;
  int64_t warmup_steps = 0;
  int64_t update_threads = 0;

  BucketOptions buckets_for(int64_t world_size) const {
    BucketOptions options = buckets;
    options.world_size = world_size;
    return options;
  }
};

// Throws UsageError for a base that there cannot be, and for settings that would have no effect.
EngineOptions engine_options(const Preset& preset);

// Throws UsageError if the preset cannot train on as many.
void check_devices(const Preset& preset, const std::vector<c10::Device>& devices, int64_t num_nodes);

}  // namespace fulgur
