#pragma once

#include "trainer/trainer_options.h"

namespace fulgur {

// The options as they will be used: defaults that depend on others filled in, default callbacks added, those that
// fast_dev_run turns off left out, ModelCheckpoint last. Throws UsageError for settings that are out of range or
// contradict each other.
TrainerOptions resolve(TrainerOptions options);

}  // namespace fulgur
