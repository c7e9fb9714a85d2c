#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/base/describe.h"
#include "fulgur/strategies/presets/ddp.h"

namespace fulgur {

struct EngineOptions;

// ddp with gradients and optimizer state sharded: each rank keeps and updates 1/world_size of them, and gathers the
// parameters. It sends as many bytes as ddp, or (k+1)/2 times as many if each of k micro-batches is reduced. With a
// shard_group of G ranks a rank keeps 1/G of them, and the world_size/G groups are replicas: parameters are gathered
// within a group, and only the sums of 1/G of the gradients go across groups. Only for element-wise optimizers, and not
// for manual optimisation. Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stages 1 and 2); Baines et al. 2021
// (FairScale); Zhao et al. 2023, arXiv:2304.11277 (hybrid sharding).
struct DdpSharded {
  static constexpr std::string_view kName = "ddp_sharded";
  int64_t stage = 2;                        // 2: shard gradients and state; 1: shard state alone
  std::string reduce = "each_micro_batch";  // or at_boundary: sends less when gradients accumulate, but keeps all
  std::string shard_group = "all";          // or host, or a number: the ranks that share the shards (hybrid sharding)
  RankOptions ranks{};
  void describe(FieldVisitor& visit);
  EngineOptions engine_options() const;
};

// Visit `reduce` and `shard_group` of a preset that has them.
void describe_reduce(std::string& reduce, FieldVisitor& visit);
void describe_shard_group(std::string& shard_group, FieldVisitor& visit);

}  // namespace fulgur
