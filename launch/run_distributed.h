#pragma once

#include <functional>

#include "fulgur/launch/session.h"

namespace fulgur {

// Runs `body` on every rank. If it throws on a rank, all ranks stop; run_distributed() throws that rank's exception
// there and a DistributedError elsewhere. In the process that started the failed rank, this error has the rank's output
// and exit code.
void run_distributed(const SessionOptions& options, const std::function<void(World&)>& body);

}  // namespace fulgur
