#pragma once

#include <functional>

#include "distributed/session.h"

namespace fulgur {

// Runs `body` on every rank. When it throws on a rank, all stop; the exception that comes out is that rank's, or a
// DistributedError with its output and exit code.
void run_distributed(const SessionOptions& options, const std::function<void(World&)>& body);

}  // namespace fulgur
