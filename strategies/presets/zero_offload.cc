#include "fulgur/strategies/presets/zero_offload.h"

#include "fulgur/strategies/engine/engine_options.h"
#include "fulgur/strategies/presets/check_unset.h"
#include "fulgur/strategies/presets/ddp_sharded.h"

namespace fulgur {

void HostOptions::describe(FieldVisitor& visit) {
  visit({.name = "ratio", .help = "share of the optimizer's state that is on the host", .min = 0, .max = 1}, &ratio);
  visit({.name = "update_threads",
         .help = "threads for the update on the host; 0: cores / local ranks, less 4 with a GPU",
         .min = 0},
        &update_threads);
}

void ZeroOffload::describe(FieldVisitor& visit) {
  host.describe(visit);
  describe_reduce(reduce, visit);
  describe_shard_group(shard_group, visit);
  ranks.describe(visit);
}

EngineOptions ZeroOffload::engine_options() const {
  if (host.ratio <= 0) {
    check_unset(kName, "update_threads", host, &HostOptions::update_threads,
                "ratio = 0, which leaves nothing on the host");
  }
  EngineOptions engine = DdpSharded{.reduce = reduce, .shard_group = shard_group, .ranks = ranks}.engine_options();
  engine.host_ratio = host.ratio;
  engine.update_threads = host.update_threads;
  return engine;
}

}  // namespace fulgur
