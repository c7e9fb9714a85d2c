#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/base/describe.h"
#include "fulgur/strategies/presets/ddp.h"
#include "fulgur/strategies/presets/zero_offload.h"

namespace fulgur {

struct EngineOptions;

// `base` with each update delayed by one step, so that it runs concurrently with the next step: a gradient is applied
// one update later than usual, to weights that have changed since it was computed. Forward therefore reads the weights
// plus a prediction of that change, unless `predict` is none. Validations, checkpoints and the end of every epoch have
// the exact weights, with all updates. docs/strategies.md has the formulas, and measurements of what the delay costs.
// Sources: Ren et al. 2021, arXiv:2101.06840, section 5.2 (the delayed update); Chen et al. 2018, arXiv:1809.02839 (the
// prediction).
struct DelayedUpdate {
  static constexpr std::string_view kName = "delayed_update";
  std::string base = "zero_offload";        // or ddp_sharded, ddp, single_device
  std::string predict = "gradient";         // or moments, repeat, none: the guess of the next update
  int64_t warmup_steps = 300;               // steps at the beginning whose updates are not delayed
  HostOptions host{};                       // `ratio` only for base zero_offload
  std::string reduce = "each_micro_batch";  // as in DdpSharded, for the bases ddp_sharded and zero_offload
  std::string shard_group = "all";          // as in DdpSharded, for the same bases
  RankOptions ranks{};
  void describe(FieldVisitor& visit);

  // Throws UsageError for an unsupported base or prediction, and for settings that would have no effect.
  EngineOptions engine_options() const;
};

}  // namespace fulgur
