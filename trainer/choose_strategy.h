#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <vector>

#include "device/devices.h"
#include "distributed/cluster_environment.h"
#include "strategies/strategy.h"
#include "trainer/trainer_options.h"

namespace fulgur {

// The devices of this machine. Where nothing was said of strategy and devices, one device; or, where somebody started
// several ranks, a device each. Throws UsageError if they are not there.
std::vector<c10::Device> choose_devices(const TrainerOptions& options);

// The devices of this host's ranks where whoever started them shows each rank one GPU, its own (srun
// --gpus-per-task=1): for every rank the one that it sees, `visible`, of as many as there are ranks on the host.
// Nothing where the ranks see more or others, were not started by others, or other devices were asked for.
std::optional<std::vector<c10::Device>> one_gpu_for_each_rank(const std::optional<ClusterEnvironment>& environment,
                                                              const Devices& asked,
                                                              const std::vector<c10::Device>& visible);

// Throws UsageError if it cannot train on them.
std::unique_ptr<Strategy> make_strategy(const TrainerOptions& options, const std::vector<c10::Device>& devices);

// For a run of one process: whoever starts several ranks does not want each to train by itself. Those that our launcher
// started may do so between runs that they share. Throws UsageError.
void check_alone();

}  // namespace fulgur
