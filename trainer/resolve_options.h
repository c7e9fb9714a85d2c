#pragma once

#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// The options as they will be used: defaults that depend on other options are filled in, default callbacks added,
// callbacks that fast_dev_run turns off removed, and ModelCheckpoint moved to the end. Throws UsageError for settings
// that are out of range or contradict each other.
TrainerOptions resolve(TrainerOptions options);

}  // namespace fulgur
