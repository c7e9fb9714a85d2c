#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "strategies/strategy.h"
#include "trainer/trainer_options.h"

namespace fulgur {

// The devices of this machine. Where nothing was said of strategy and devices, one device; or, where somebody started
// several ranks, a device each. Throws UsageError if they are not there.
std::vector<c10::Device> choose_devices(const TrainerOptions& options);

// Throws UsageError if it cannot train on them.
std::unique_ptr<Strategy> make_strategy(const TrainerOptions& options, const std::vector<c10::Device>& devices);

// For a strategy of one process: whoever starts several ranks does not want each to train by itself. Those that our
// launcher started may do so between runs that they share. Throws UsageError.
void check_alone();

}  // namespace fulgur
