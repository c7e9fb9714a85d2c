#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/distributed/world.h"
#include "fulgur/strategies/engine/replica_group.h"

namespace fulgur {

// How the ranks of a run share the elements of a bucket. Consecutive ranks form a group, in which each rank has one
// shard of every bucket; all groups have the same shards. With one shard every rank has everything (ddp); with as many
// shards as ranks there is one group (ddp_sharded); any other number is hybrid sharding.
struct ShardGrid {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t num_shards = 1;  // ranks in a group

  int64_t shard() const { return rank % num_shards; }
  int64_t group() const { return rank / num_shards; }
  int64_t num_groups() const { return world_size / num_shards; }

  // This rank's shard.
  ElementRange shard_of(int64_t num_elements) const { return rank_range(num_elements, shard(), num_shards); }

  // The part of this rank's shard that no other rank saves or averages. `num_elements` is a multiple of the world size,
  // as buckets have it, or there is one shard, or one group.
  ElementRange own_of(int64_t num_elements) const {
    return rank_range(num_elements, shard() * num_groups() + group(), world_size);
  }
};

// The collectives between ranks that shard buckets.
// Ownership: borrows the World. Threading: as a Collective.
class ShardGroups {
 public:
  // Connects the groups if there are several with several ranks each; then every rank has to call it. `rank_order` adds
  // groups in their order, so that bits do not depend on where buckets end.
  ShardGroups(World& world, int64_t num_shards, c10::Device device, bool rank_order);

  const ShardGrid& grid() const { return grid_; }

  // The ranks among which buckets are sharded: a reduce_scatter sums over all ranks of the run and leaves this rank its
  // shard; an all_gather brings the shards together. With one shard these are all ranks.
  Collective& data() { return replicas_ ? *replicas_ : world_.data(); }

  // Every rank contributes its own_of() of each tensor, and gets the whole.
  void gather_own(const std::vector<at::Tensor>& flats);

 private:
  World& world_;
  const ShardGrid grid_;
  std::optional<ReplicaGroup> replicas_;  // in hybrid sharding
};

}  // namespace fulgur
