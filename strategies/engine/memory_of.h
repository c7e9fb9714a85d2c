#pragma once

#include "fulgur/core/model_memory.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/strategies/engine/engine_options.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// The memory that a rank would keep for a model from step to step with FlatStrategy and these options, computed without
// allocating it (Strategy::model_memory).
ModelMemory memory_of(const EngineOptions& engine, const Module& module, const Optimizers& optimizers,
                      const MemoryRequest& request);

}  // namespace fulgur
