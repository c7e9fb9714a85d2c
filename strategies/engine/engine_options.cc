#include "fulgur/strategies/engine/engine_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

#include "fulgur/base/error.h"
#include "fulgur/strategies/engine/gradient_memory.h"

namespace fulgur {
namespace {

// Whether each group lies on one host, or has all ranks of several.
bool goes_with_hosts(int64_t size, int64_t ranks_per_host) {
  return size % ranks_per_host == 0 || ranks_per_host % size == 0;
}

std::vector<std::string> possible_groups(int64_t world_size, int64_t ranks_per_host) {
  std::vector<std::string> groups{"all"};
  for (int64_t size = 2; size < world_size; ++size) {
    if (world_size % size == 0 && goes_with_hosts(size, ranks_per_host)) groups.push_back(std::to_string(size));
  }
  return groups;
}

}  // namespace

// On a GPU a parameter begins at a multiple of 256 bytes, as an allocation of its own would, because cuBLASLt chooses
// algorithms by the alignment. On a CPU autograd makes the gradient of a bucket's only parameter in the bucket's memory
// (GradientViews), unless gradients are converted on their way. A large parameter therefore has a bucket to itself:
// between ranks of one host, one more reduction takes less time than the copy of its gradient to a bucket that others
// share (docs/benchmarks.md).
BucketOptions EngineOptions::buckets_for(int64_t world_size, c10::DeviceType device_type) const {
  BucketOptions options = buckets;
  options.world_size = world_size;
  if (device_type != c10::kCPU) options.slot_alignment_bytes = 256;
  const bool may_be_made_there = device_type == c10::kCPU && world_size > 1 && !keeps_sums(world_size) && !wire;
  if (may_be_made_there) options.large_bytes = GradientMemory::kLeastBytes;
  return options;
}

void check_devices(std::string_view strategy, const EngineOptions& engine, const std::vector<c10::Device>& devices,
                   int64_t num_nodes) {
  const auto num_devices = static_cast<int64_t>(devices.size());
  if (engine.world) num_shards(engine, num_devices * num_nodes, num_devices);
  if (engine.world || (devices.size() == 1 && num_nodes == 1)) return;
  if (engine.has_replicas) {
    if (num_nodes == 1) return;
    throw UsageError(
        fmt::format("strategy '{}' is one process on one machine, but num_nodes = {}; set it to 1 or write "
                    "strategy = 'ddp'",
                    strategy, num_nodes));
  }
  throw UsageError(
      fmt::format("strategy '{}{}' trains on one device, but devices = {} and num_nodes = {}; set both to 1 or write "
                  "{} = 'ddp'",
                  strategy, engine.delayed ? "' over 'single_device" : "", devices.size(), num_nodes,
                  engine.delayed ? "strategy.base" : "strategy"));
}

int64_t num_shards(const EngineOptions& engine, int64_t world_size, int64_t ranks_per_host) {
  if (!engine.shard) return 1;
  const bool is_of_host = engine.shard_group == kRanksOfHost;
  const int64_t size = is_of_host ? ranks_per_host : engine.shard_group;
  if (engine.shard_group == kAllRanks || size == world_size) return world_size;
  if (is_of_host && size == 1) {
    throw UsageError(
        fmt::format("strategy.shard_group = host shards nothing where each of {} hosts has one rank; write all, or "
                    "strategy = 'ddp'",
                    world_size));
  }
  if (world_size % size != 0) {
    throw UsageError(fmt::format("strategy.shard_group = {} does not divide the {} ranks; possible: {}", size,
                                 world_size, fmt::join(possible_groups(world_size, ranks_per_host), ", ")));
  }
  if (!goes_with_hosts(size, ranks_per_host)) {
    throw UsageError(
        fmt::format("strategy.shard_group = {} with {} ranks on each host: groups would span hosts unevenly; possible: "
                    "host, {}",
                    size, ranks_per_host, fmt::join(possible_groups(world_size, ranks_per_host), ", ")));
  }
  return size;
}

}  // namespace fulgur
