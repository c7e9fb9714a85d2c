#pragma once

#include <memory>

#include "fulgur/base/options_registry.h"
#include "fulgur/core/lr_scheduler.h"

namespace fulgur::optim {

using LRSchedulerRegistry = OptionsRegistry<std::shared_ptr<LRScheduler>>;

// The learning-rate schedules that a config may name ([scheduler] type = "StepLR"): the schedules of
// optim/lr_schedulers.h, except those made of functions or of other schedules, and the schedules that a program adds
// before it reads its options: lr_scheduler_registry().add<MyLR>().
LRSchedulerRegistry& lr_scheduler_registry();

}  // namespace fulgur::optim
