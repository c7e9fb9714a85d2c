#include "fulgur/strategies/presets/ddp_sharded.h"

#include "fulgur/base/names.h"
#include "fulgur/strategies/engine/engine_options.h"

namespace fulgur {

void describe_reduce(std::string& reduce, FieldVisitor& visit) {
  visit({.name = "reduce",
         .help = "when gradients are reduced over ranks",
         .choices = {"each_micro_batch", "at_boundary"}},
        &reduce);
}

void DdpSharded::describe(FieldVisitor& visit) {
  visit({.name = "stage",
         .help = "what is sharded; 2: gradients and optimizer state, 1: state alone",
         .min = 1,
         .max = 2},
        &stage);
  describe_reduce(reduce, visit);
  ranks.describe(visit);
}

EngineOptions DdpSharded::engine_options() const {
  EngineOptions engine = ranks.engine_options();
  engine.shard = true;
  engine.each_micro_batch = stage == 2 && canonical_name(reduce) == "each_micro_batch";
  return engine;
}

}  // namespace fulgur
