#include "distributed/run_distributed.h"

#include <c10/util/Exception.h>

#include <exception>

#include "core/logging.h"
#include "distributed/cluster_environment.h"
#include "distributed/environment_variables.h"
#include "distributed/launcher.h"

namespace fulgur {
namespace {

std::string message_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error ? c10_error->what_without_backtrace() : error.what();
}

void run_rank(const ClusterEnvironment& environment, const WorldOptions& options,
              const std::function<void(World&)>& body) {
  set_log_rank(environment.rank, environment.world_size);
  World world(environment, options);
  try {
    body(world);
    world.leave();
  } catch (const std::exception& error) {
    world.abort(message_of(error));
    throw;
  } catch (...) {
    world.abort("an exception that is no std::exception");
    throw;
  }
}

}  // namespace

void run_distributed(const DistributedOptions& options, const std::function<void(World&)>& body) {
  const EnvironmentVariables variables = process_environment_variables();
  if (const auto environment = detect_cluster_environment(variables)) {
    check_world_size(*environment, options.num_devices, options.num_nodes);
    return run_rank(*environment, options.world, body);
  }
  if (options.num_devices * options.num_nodes == 1) {
    World world;
    return body(world);
  }
  Launcher launcher(
      {.local_world_size = options.num_devices, .num_nodes = options.num_nodes, .timeout_s = options.world.timeout_s},
      variables);
  try {
    run_rank(launcher.environment(), options.world, body);
  } catch (...) {
    launcher.fail(std::current_exception());
  }
  launcher.finish();
}

}  // namespace fulgur
