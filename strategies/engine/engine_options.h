#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "fulgur/distributed/world.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/preset_options.h"

namespace fulgur {

using Preset = std::variant<SingleDevice, Dp, Ddp, DdpSharded, ZeroOffload, DelayedUpdate>;

// The options of FlatStrategy that a preset sets.
struct EngineOptions {
  std::optional<WorldOptions> world{};  // one rank per device; nullopt: one process
  BucketOptions buckets{};
  bool broadcast_buffers = false;
  bool shard = false;             // a rank updates only its own ranges
  bool each_micro_batch = false;  // reduce after each micro-batch, not once per accumulation window
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

// Throws UsageError for an unsupported base, and for settings that would have no effect.
EngineOptions engine_options(const Preset& preset);

// Throws UsageError if the preset cannot train on these devices and this number of machines.
void check_devices(const Preset& preset, const std::vector<c10::Device>& devices, int64_t num_nodes);

}  // namespace fulgur
