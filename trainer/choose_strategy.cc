#include "trainer/choose_strategy.h"

#include <fmt/format.h>

#include <optional>

#include "core/error.h"
#include "core/names.h"
#include "distributed/session.h"
#include "strategies/presets.h"

namespace fulgur {
namespace {

// The ranks that torchrun, srun or mpirun started, if one of them did.
std::optional<ClusterEnvironment> cluster() { return detect_cluster_environment(process_environment_variables()); }

bool is_auto(const Devices& devices) { return canonical_name(devices.to_string()) == "auto"; }

}  // namespace

std::vector<c10::Device> choose_devices(const TrainerOptions& options) {
  const auto environment = cluster();
  Devices devices = options.devices;
  if (is_auto(devices) && environment) devices = Devices(environment->local_world_size);
  std::vector<c10::Device> resolved = resolve_devices(options.accelerator, devices);
  if (options.strategy.is_auto() && is_auto(devices)) resolved.resize(1, c10::kCPU);
  return resolved;
}

std::unique_ptr<Strategy> make_strategy(const TrainerOptions& options, const std::vector<c10::Device>& devices) {
  auto strategy = options.strategy.make(devices.size() > 1 || options.num_nodes > 1 ? Ddp::kName : SingleDevice::kName);
  strategy->check_devices(devices, options.num_nodes);
  if (options.sync_batchnorm && devices.size() > 1 && !strategy->rank_per_device()) {
    throw UsageError(
        fmt::format("sync_batchnorm is true, but strategy '{}' has no ranks that could exchange statistics; set it to "
                    "false or write strategy = 'ddp'",
                    strategy->name()));
  }
  return strategy;
}

void check_alone() {
  const auto environment = cluster();
  if (environment && environment->name != "fulgur" && !process_session::joined()) check_world_size(*environment, 1, 1);
}

}  // namespace fulgur
