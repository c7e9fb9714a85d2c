#pragma once

#include "trainer/trainer_options.h"

namespace fulgur {

// Adds the callbacks that the enable_* options ask for, where the list has none of that kind yet, and moves those that
// run last to the end. Throws UsageError if a callback is null, or is of a kind that an option turned off.
void add_default_callbacks(TrainerOptions& options);

}  // namespace fulgur
