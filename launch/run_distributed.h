#pragma once

#include <functional>

#include "fulgur/launch/session.h"

namespace fulgur {

// Runs `body` on every rank. If it throws on a rank, all ranks stop; run_distributed() throws that rank's exception
// there and a DistributedError elsewhere, which in the process that started the rank has its output and exit code.
void run_distributed(const SessionOptions& options, const std::function<void(World&)>& body);

}  // namespace fulgur
