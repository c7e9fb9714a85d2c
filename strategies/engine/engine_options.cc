#include "fulgur/strategies/engine/engine_options.h"

#include <fmt/format.h>

#include "fulgur/base/error.h"

namespace fulgur {

void check_devices(std::string_view strategy, const EngineOptions& engine, const std::vector<c10::Device>& devices,
                   int64_t num_nodes) {
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

}  // namespace fulgur
