#pragma once

#include <memory>

#include "fulgur/base/options_registry.h"
#include "fulgur/core/callback.h"

namespace fulgur {

// The callbacks that a config may list ([[callbacks]] type = "EarlyStopping"): fulgur's own, except those that are made
// of functions or maps, and those that a program adds before it reads its options:
// callback_registry().add<MyCallback>().
OptionsRegistry<std::shared_ptr<Callback>>& callback_registry();

}  // namespace fulgur
