#pragma once

#include <memory>
#include <vector>

#include "fulgur/base/options_registry.h"
#include "fulgur/core/optimizer.h"

namespace fulgur::optim {

using OptimizerRegistry = OptionsRegistry<std::unique_ptr<Optimizer>, std::vector<ParamGroup>>;

// The optimizers that a config may name ([optimizer] type = "AdamW"): those of optim/, and those that a program adds
// before it reads its options: optimizer_registry().add<MyOptimizer>(), for an optimizer with an Options that describes
// itself and a constructor from parameter groups and options.
OptimizerRegistry& optimizer_registry();

}  // namespace fulgur::optim
