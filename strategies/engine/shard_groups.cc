#include "fulgur/strategies/engine/shard_groups.h"

namespace fulgur {
namespace {

template <class Gather>
void gather_all(const std::vector<at::Tensor>& flats, const Gather& gather) {
  std::vector<Work> gathering;
  for (const at::Tensor& flat : flats) gathering.push_back(gather(flat));
  for (Work& work : gathering) work.wait();
}

}  // namespace

ShardGroups::ShardGroups(World& world, int64_t num_shards, c10::Device device, bool rank_order)
    : world_(world), grid_{.rank = world.rank(), .world_size = world.world_size(), .num_shards = num_shards} {
  if (num_shards == 1 || grid_.num_groups() == 1) return;
  const World::Groups& groups = world.groups_of(num_shards);
  replicas_.emplace(groups.within, groups.across, device, rank_order);
}

// In hybrid sharding first the parts of each shard are brought together, across groups, then the shards.
void ShardGroups::gather_own(const std::vector<at::Tensor>& flats) {
  if (grid_.world_size == 1) return;
  if (replicas_) {
    Collective& across = *world_.groups_of(grid_.num_shards).across;
    gather_all(flats, [&](const at::Tensor& flat) { return across.all_gather(grid_.shard_of(flat.numel()).of(flat)); });
  }
  gather_all(flats, [&](const at::Tensor& flat) { return data().all_gather(flat); });
}

}  // namespace fulgur
