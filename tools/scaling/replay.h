#pragma once

#include <cstdint>

#include "tools/scaling/machine.h"
#include "tools/scaling/record_step.h"

namespace fulgur::scaling {

// What a step of the large model asks of one rank.
struct Workload {
  double num_params = 0;
  double param_bytes = 2;       // size of an element of parameters and gradients
  double forward_flops = 0;     // what a rank computes in forward
  double backward_flops = 0;    // what a rank computes in backward, with what it computes again of forward
  double update_bytes = 28;     // per element, that an update reads and writes
  double extra_step_bytes = 0;  // memory traffic per element in forward and backward that is not part of the flops
  int64_t micro_batches = 1;    // the exchanges are those of the last one
  int64_t shards = 1;           // ranks among which the update is divided
  bool updates_on_host = false;
};

struct StepTime {
  double step_s = 0;
  double compute_s = 0;      // forward and backward
  double update_s = 0;       // the rank's update, wherever it runs
  double exposed_s = 0;      // the rest: what the training thread waits for, or moves itself
  double bytes_within = 0;   // what a rank sends to ranks of its host
  double bytes_between = 0;  // what a host sends to other hosts
  double bytes_to_host = 0;  // what a rank copies between its device and its host, both ways
};

// A ring's cost of one exchange. A ring goes through the ranks of a host, then to the next host: so every rank sends
// M (N - 1) / N bytes of a reduce_scatter or an all_gather of M bytes between N ranks, twice that for an all_reduce,
// and as much leaves each host. Messages follow each other along a tree within a host and between hosts, as NCCL's do.
// Ranks that compute on a host's cores exchange through its memory instead: for a sum a rank copies what the others
// need, reads theirs and adds; to hand a part out it copies that part, and then those of the others.
struct ExchangeCost {
  double seconds = 0;
  double bytes_within = 0;
  double bytes_between = 0;
};
ExchangeCost cost_of(Exchange exchange, Scope scope, double num_bytes, int64_t ranks, int64_t shards,
                     const Machine& machine);

// Plays the recorded events with the sizes of the workload on `ranks` ranks of a machine, by a clock of its own. One
// exchange of a scope runs at a time, in the order of launches. Copies between device and host have a lane each way.
StepTime replay(const RecordedStep& recorded, const Workload& workload, const Machine& machine, int64_t ranks);

}  // namespace fulgur::scaling
