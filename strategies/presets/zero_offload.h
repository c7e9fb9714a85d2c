#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/base/describe.h"
#include "fulgur/strategies/presets/ddp.h"

namespace fulgur {

struct EngineOptions;

// How much of the optimizer's work is done on the host.
struct HostOptions {
  double ratio = 1;            // share of the elements with state on the host
  int64_t update_threads = 0;  // per rank, for the update on the host; 0: cores / local ranks, less 4 with a GPU
  void describe(FieldVisitor& visit);
};

// ddp_sharded with gradients, optimizer state and the update on the host: of the model state a device keeps only its
// parameters in the training precision, and the buckets of gradients that are on their way to the host. Works with
// one device, too. What is written to a parameter between steps goes into the host's copy, but is lost for parameters
// of 16 bits, whose masters replace it. Only for element-wise optimizers, and not for manual optimisation. On a CPU it
// saves nothing and takes 20 bytes per parameter against 16: use it on machines with a GPU, and in tests.
// Source: Ren et al. 2021, arXiv:2101.06840; Lian et al. 2023 for `ratio` (twin-flow).
struct ZeroOffload {
  static constexpr std::string_view kName = "zero_offload";
  HostOptions host{};                       // with ratio = 0 it is ddp_sharded
  std::string reduce = "each_micro_batch";  // as in DdpSharded
  std::string shard_group = "all";          // as in DdpSharded
  RankOptions ranks{};
  void describe(FieldVisitor& visit);
  EngineOptions engine_options() const;  // throws UsageError for settings that would have no effect
};

}  // namespace fulgur
