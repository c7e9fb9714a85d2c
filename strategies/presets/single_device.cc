#include "fulgur/strategies/presets/single_device.h"

#include "fulgur/strategies/engine/engine_options.h"

namespace fulgur {

EngineOptions SingleDevice::engine_options() const { return {}; }

}  // namespace fulgur
