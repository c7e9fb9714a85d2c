#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/loader.h"
#include "core/make_module.h"
#include "data/data_module.h"
#include "trainer/batch_limit.h"

// Whether a module and data fit together. All throw SetupError.
namespace fulgur {

void require(bool condition, const std::string& message);

// A step hook; `need` says who wants it.
void require_step(const ModuleHandle& module, bool overridden, std::string_view signature, std::string_view need);

// The loader, which can give at least one batch. `name` as in Loaders.
std::shared_ptr<Loader> checked(std::shared_ptr<Loader> loader, std::string_view name);
LoaderList checked(LoaderList loaders, std::string_view name);

// The loaders to validate with during fit; none if the limit leaves none, or if there is no data, which `warn` says to
// a module that validates.
LoaderList validation_loaders(const ModuleHandle& module, DataModule& data, const BatchLimit& limit, bool warn);

}  // namespace fulgur
