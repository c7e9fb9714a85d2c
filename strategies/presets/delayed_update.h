#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/base/describe.h"
#include "fulgur/strategies/presets/ddp.h"
#include "fulgur/strategies/presets/zero_offload.h"

namespace fulgur {

struct EngineOptions;

// `base` with each update delayed by one step, so that it runs concurrently with the next step: the parameters of
// step i+1 hold the gradients up to those of step i-1. Converges for smaller learning rates than the synchronous
// update (on a quadratic up to half of them); let the first steps be synchronous. Source: Ren et al. 2021,
// arXiv:2101.06840, section 5.2.
struct DelayedUpdate {
  static constexpr std::string_view kName = "delayed_update";
  std::string base = "zero_offload";        // or ddp_sharded, ddp, single_device
  int64_t warmup_steps = 0;                 // synchronous steps at the beginning
  bool drain_before_save = false;           // checkpoints first complete the update in progress: changes training
  HostOptions host{};                       // `ratio` only for base zero_offload
  std::string reduce = "each_micro_batch";  // as in DdpSharded, for the bases ddp_sharded and zero_offload
  RankOptions ranks{};
  void describe(FieldVisitor& visit);

  // Throws UsageError for an unsupported base, and for settings that would have no effect.
  EngineOptions engine_options() const;
};

}  // namespace fulgur
