#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "fulgur/distributed/world.h"
#include "fulgur/optim/element_wise_optimizer.h"
#include "fulgur/strategies/engine/flat_parameters.h"

namespace fulgur {

// Special values of EngineOptions::shard_group.
inline constexpr int64_t kAllRanks = 0, kRanksOfHost = -1;

// What a preset asks of FlatStrategy.
struct EngineOptions {
  std::optional<WorldOptions> world{};  // one rank per device; nullopt: one process
  bool has_replicas = false;            // the one process may have several devices, each with a replica of the module
  BucketOptions buckets{};
  std::optional<c10::ScalarType> wire{};  // type in which gradients travel; nullopt: as the parameters
  bool broadcast_buffers = false;
  bool shard = false;               // a rank updates only its own ranges
  int64_t shard_group = kAllRanks;  // number of ranks that share the shards; further groups of this size are replicas
  bool each_micro_batch = false;    // reduce after each micro-batch, not once per accumulation window
  double host_ratio = 0;
  bool delayed = false;
  optim::PredictBy predict = optim::PredictBy::none;  // if delayed
  int64_t warmup_steps = 0;
  int64_t update_threads = 0;

  // Whether sums of gradients are kept apart from the parameters, in the ranges that a rank updates.
  bool keeps_sums(int64_t world_size) const { return (shard && world_size > 1) || host_ratio > 0 || delayed; }

  BucketOptions buckets_for(int64_t world_size, c10::DeviceType device_type) const;  // for parameters on such a device
};

// Throws UsageError if the strategy of this name cannot train on these devices of each of num_nodes machines.
void check_devices(std::string_view strategy, const EngineOptions& engine, const std::vector<c10::Device>& devices,
                   int64_t num_nodes);

// The number of shards of a bucket; 1: every rank has all. Throws UsageError for a shard_group that does not go with
// these ranks.
int64_t num_shards(const EngineOptions& engine, int64_t world_size, int64_t ranks_per_host);

}  // namespace fulgur
