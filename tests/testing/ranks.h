#pragma once

#include <cstdint>
#include <functional>

#include "fulgur/distributed/world.h"

namespace fulgur::testing {

// Runs `body` once per rank, each in a thread of its own, connected by shared memory, or otherwise by Gloo over the
// loopback interface. Trainers in `body` run on these ranks. ATen has one thread per rank. If ranks throw, the others
// are aborted, as in a run of processes, and the first rank's exception is rethrown. Timeout: 20 s, unless the
// options say otherwise; heartbeats every 0.1 s.
void run_ranks(int64_t world_size, const std::function<void(World&)>& body);
void run_ranks(int64_t world_size, WorldOptions options, const std::function<void(World&)>& body);

// The same with ranks that count as ranks of several hosts.
void run_ranks_on_hosts(int64_t num_hosts, int64_t ranks_per_host, WorldOptions options,
                        const std::function<void(World&)>& body);

inline constexpr double kRanksTimeoutS = 20;

// The options of a run without options, for ranks that are connected by shared memory, or all by Gloo.
WorldOptions connected(bool shared_memory);

}  // namespace fulgur::testing
