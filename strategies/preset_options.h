#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/describe.h"

namespace fulgur {

// One process, one device.
struct SingleDevice {
  static constexpr std::string_view kName = "single_device";
  void describe(FieldVisitor&) {}
};

// Data parallel in one process: a replica of the model and a thread for each device, each with its part of every batch.
// See Replicas for what that asks of a module: make_module, and a loss that is a mean over its batch.
struct Dp {
  static constexpr std::string_view kName = "dp";
  void describe(FieldVisitor&) {}
};

// Distributed data parallel: a process for each device, each with the whole model and its part of every batch.
// Source: Li et al. 2020, arXiv:2006.15704.
struct Ddp {
  static constexpr std::string_view kName = "ddp";
  double bucket_cap_mib = 25;      // of gradients that are reduced together; smaller starts sooner, costs more calls
  double first_bucket_mib = 1;     // of the first, so that reducing starts early in backward
  bool broadcast_buffers = true;   // after each step buffers (running means) are those of rank 0
  double timeout_s = 1800;         // of every collective
  double connect_timeout_s = 300;  // until every rank has come
  void describe(FieldVisitor& visit);
};

// ddp with gradients and optimizer state sharded: each rank keeps and updates 1/world_size of them, and gathers the
// parameters. The bytes on the wire are those of ddp; where each of k micro-batches is reduced they are (k+1)/2 times
// as many. Only for element-wise optimizers, and not for manual optimisation. Source: Rajbhandari et al. 2020,
// arXiv:1910.02054 (ZeRO, stages 1 and 2); Baines et al. 2021 (FairScale).
struct DdpSharded {
  static constexpr std::string_view kName = "ddp_sharded";
  int64_t stage = 2;                        // 2: gradients and state; 1: state alone
  std::string reduce = "each_micro_batch";  // or at_boundary: fewer bytes sent where gradients accumulate, but all kept
  double bucket_cap_mib = 25;               // as in Ddp, all of these
  double first_bucket_mib = 1;
  bool broadcast_buffers = true;
  double timeout_s = 1800;
  double connect_timeout_s = 300;
  void describe(FieldVisitor& visit);
};

// ddp_sharded with gradients, optimizer state and the update on the host: of the model state a device keeps its
// parameters in the training precision, and a window of gradients on their way down. Works with one device, too. What
// is written to a parameter between steps is lost. For element-wise optimizers, and not for manual optimisation. On a
// CPU it saves nothing and takes 20 bytes per parameter against 16: it is there for tests and for machines with a GPU.
// Source: Ren et al. 2021, arXiv:2101.06840; Lian et al. 2023 for `ratio` (twin-flow).
struct ZeroOffload {
  static constexpr std::string_view kName = "zero_offload";
  double ratio = 1;                         // of the elements: these have their state on the host; 0 is ddp_sharded
  int64_t update_threads = 0;               // of a rank, for the update on the host; 0: cores / ranks of the machine,
                                            // less 4 with a GPU
  std::string reduce = "each_micro_batch";  // as in DdpSharded, all of these
  double bucket_cap_mib = 25;
  double first_bucket_mib = 1;
  bool broadcast_buffers = true;
  double timeout_s = 1800;
  double connect_timeout_s = 300;
  void describe(FieldVisitor& visit);
};

// `base` with each update one step late, so that it runs beside the next step: the parameters of step i+1 hold the
// gradients up to those of step i-1. Converges for smaller learning rates than the synchronous update (on a quadratic
// up to half of them); let the first steps be synchronous. Source: Ren et al. 2021, arXiv:2101.06840, section 5.2.
struct DelayedUpdate {
  static constexpr std::string_view kName = "delayed_update";
  std::string base = "zero_offload";        // or ddp_sharded, ddp, single_device
  int64_t warmup_steps = 0;                 // that are synchronous, at the beginning
  bool drain_before_save = false;           // a checkpoint ends the update under way first, which changes the training
  double ratio = 1;                         // of base zero_offload
  int64_t update_threads = 0;               // as in ZeroOffload
  std::string reduce = "each_micro_batch";  // as in DdpSharded, all of these
  double bucket_cap_mib = 25;
  double first_bucket_mib = 1;
  bool broadcast_buffers = true;
  double timeout_s = 1800;
  double connect_timeout_s = 300;
  void describe(FieldVisitor& visit);
};

}  // namespace fulgur
