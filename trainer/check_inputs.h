#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "fulgur/core/loader.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/data/data_module.h"
#include "fulgur/loops/batch_limit.h"
#include "fulgur/trainer/optimizer_choice.h"

// Checks that a module and data fit together. All functions throw SetupError.
namespace fulgur {

void require(bool condition, const std::string& message);

// Requires that the Module overrides a step hook; `need` says what the hook is needed for.
void require_step(const ModuleHandle& module, bool overridden, std::string_view signature, std::string_view need);

// Requires what fit needs of a Module, and that either the Module or the options have an optimizer.
void require_fit_hooks(const ModuleHandle& module, const OptimizerChoice& optimizer);

// Requires that the Module has an optimizer.
void require_optimizer(const Module& module, bool has_one);

// Returns the loader if it can yield at least one batch. `name` is its name in Loaders.
std::shared_ptr<Loader> checked(std::shared_ptr<Loader> loader, std::string_view name);
LoaderList checked(LoaderList loaders, std::string_view name);

// The loaders to validate with during fit; empty if the limit is zero, or if there is no validation data. With `warn`,
// missing data is logged as a warning if the Module overrides validation_step.
LoaderList validation_loaders(const ModuleHandle& module, DataModule& data, const BatchLimit& limit, bool warn);

}  // namespace fulgur
