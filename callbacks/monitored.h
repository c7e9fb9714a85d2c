#pragma once

#include <string>
#include <string_view>

#include "fulgur/core/callback.h"

namespace fulgur {

// For callbacks that follow a metric by name. `callback` is the callback's name in messages.

// Warns, on rank 0, of a monitor that a validation would log, if fit does not validate. Called in on_train_start.
void warn_if_never_validated(TrainerControl& trainer, std::string_view callback, const std::string& monitor);

// Throws SetupError with the names of `metrics`, in which `monitor` is not.
[[noreturn]] void throw_unknown_monitor(TrainerControl& trainer, std::string_view callback, const std::string& monitor,
                                        const Metrics& metrics);

}  // namespace fulgur
