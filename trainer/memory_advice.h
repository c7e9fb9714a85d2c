#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// What would need less memory, for a run that ended because a GPU had none left: the table of the strategies' memory,
// and the options that lower it. Empty for every other failure, and if there are no optimizers to tell it from.
// `num_devices` is their number on all machines, `accumulate_grad_batches` that of the epoch.
std::string memory_advice(const std::exception_ptr& failure, const Module& module, const Optimizers& optimizers,
                          const TrainerOptions& options, int64_t num_devices, c10::DeviceType device_type,
                          int64_t accumulate_grad_batches);

}  // namespace fulgur
