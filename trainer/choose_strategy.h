#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <vector>

#include "fulgur/device/devices.h"
#include "fulgur/launch/cluster_environment.h"
#include "fulgur/strategies/strategy.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// The devices of this machine that the run uses. If neither strategy nor devices are set, one device; if a launcher
// started several ranks, one device for each. Throws UsageError if the machine does not have them.
std::vector<c10::Device> choose_devices(const TrainerOptions& options);

// The devices of this host's ranks if the launcher shows each rank only its own GPU (srun --gpus-per-task=1): for
// every rank on the host the one GPU that this process sees, `visible`. nullopt if the ranks see several GPUs or none,
// were not started by a launcher, or if another number of devices is requested.
std::optional<std::vector<c10::Device>> one_gpu_for_each_rank(const std::optional<ClusterEnvironment>& environment,
                                                              const Devices& asked,
                                                              const std::vector<c10::Device>& visible);

// Throws UsageError if the strategy cannot train on `devices`.
std::unique_ptr<Strategy> make_strategy(const TrainerOptions& options, const std::vector<c10::Device>& devices);

// Called for a run of one process. Throws UsageError if a launcher started several ranks, because each rank would train
// by itself. Ranks that fulgur started may run alone between the runs that they share.
void check_alone();

}  // namespace fulgur
