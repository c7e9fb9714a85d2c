#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

#include "distributed/world.h"

namespace fulgur {

struct DistributedOptions {
  int64_t num_devices = 1;  // ranks on each host
  int64_t num_nodes = 1;
  WorldOptions world{};
};

// Runs `body` on every rank: on those that torchrun, srun or mpirun started, else on this process and on others that it
// starts (Launcher). With one device of one host that is a plain call. When `body` throws on a rank, all stop; the
// exception that comes out is that rank's, or a DistributedError with its output and exit code.
void run_distributed(const DistributedOptions& options, const std::function<void(World&)>& body);

}  // namespace fulgur
