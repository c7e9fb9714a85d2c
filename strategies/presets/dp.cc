#include "fulgur/strategies/presets/dp.h"

#include "fulgur/strategies/engine/engine_options.h"

namespace fulgur {

EngineOptions Dp::engine_options() const { return {.has_replicas = true}; }

}  // namespace fulgur
