#include "fulgur/trainer/choose_strategy.h"

#include <fmt/format.h>

#include <optional>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/launch/session.h"
#include "fulgur/strategies/presets.h"

namespace fulgur {
namespace {

// The environment that a launcher (torchrun, srun, mpirun) set for its ranks; nullopt: there is no launcher.
std::optional<ClusterEnvironment> cluster() { return detect_cluster_environment(process_environment_variables()); }

bool is_auto(const Devices& devices) { return canonical_name(devices.to_string()) == "auto"; }

}  // namespace

std::vector<c10::Device> choose_devices(const TrainerOptions& options) {
  const auto environment = cluster();
  Devices devices = options.devices;
  if (const auto one = one_gpu_for_each_rank(environment, devices, resolve_devices(options.accelerator, Devices())))
    return *one;
  if (is_auto(devices) && environment) devices = Devices(environment->local_world_size);
  std::vector<c10::Device> resolved = resolve_devices(options.accelerator, devices);
  if (options.strategy.is_auto() && is_auto(devices)) resolved.resize(1, c10::kCPU);
  return resolved;
}

std::optional<std::vector<c10::Device>> one_gpu_for_each_rank(const std::optional<ClusterEnvironment>& environment,
                                                              const Devices& asked,
                                                              const std::vector<c10::Device>& visible) {
  if (!environment || environment->local_world_size == 1) return std::nullopt;
  const bool is_asked_for = is_auto(asked) || asked.count() == environment->local_world_size;
  if (!is_asked_for || visible.size() != 1 || !visible.front().is_cuda()) return std::nullopt;
  return std::vector<c10::Device>(static_cast<size_t>(environment->local_world_size), visible.front());
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
