#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// Advice for a run that ended because a GPU ran out of memory: a table of the memory that each strategy needs, and the
// options that need less. Empty for every other failure, and if there are no optimizers to estimate from.
// `num_devices` counts the devices of all machines; `accumulate_grad_batches` is the value in the epoch that failed.
std::string memory_advice(const std::exception_ptr& failure, const Module& module, const Optimizers& optimizers,
                          const TrainerOptions& options, int64_t num_devices, c10::DeviceType device_type,
                          int64_t accumulate_grad_batches);

}  // namespace fulgur
