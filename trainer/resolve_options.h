#pragma once

#include "fulgur/loops/loop_plan.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// The options as they will be used: defaults that depend on other options are filled in, default callbacks added,
// callbacks that fast_dev_run turns off removed, and callbacks with runs_last() moved to the end. Throws UsageError for
// settings that are out of range or contradict each other.
TrainerOptions resolve(TrainerOptions options);

// What bounds a whole training with these options, which are not resolved yet: fast_dev_run has bounds of its own.
LoopPlan::Bounds bounds_of(const TrainerOptions& given);

// What resolved options mean for the loops. `whole`: bounds_of() the options before.
LoopPlan plan_of(const TrainerOptions& options, const LoopPlan::Bounds& whole);

// Warns that fit trains for a default number of epochs if no option bounds it.
void warn_of_default_bound(const TrainerOptions& options);

}  // namespace fulgur
