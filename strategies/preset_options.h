#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/base/describe.h"

namespace fulgur {

// One process, one device.
struct SingleDevice {
  static constexpr std::string_view kName = "single_device";
  void describe(FieldVisitor&) {}
};

// Data parallel in one process: a replica of the model and a thread for each device, each with its part of every
// batch. See Replicas for the requirements on a module: make_module, and a loss that is a mean over its batch.
struct Dp {
  static constexpr std::string_view kName = "dp";
  void describe(FieldVisitor&) {}
};

// Distributed data parallel: a process for each device, each with the whole model and its part of every batch.
// Source: Li et al. 2020, arXiv:2006.15704.
struct Ddp {
  static constexpr std::string_view kName = "ddp";
  double bucket_cap_mib = 25;      // gradients that are reduced together; smaller: starts sooner, costs more calls
  double first_bucket_mib = 1;     // cap of the first bucket, so that reducing starts early in backward
  bool broadcast_buffers = true;   // after each step rank 0 broadcasts buffers (running means)
  double timeout_s = 1800;         // limit for every collective
  double connect_timeout_s = 300;  // limit until every rank has connected
  void describe(FieldVisitor& visit);
};

// ddp with gradients and optimizer state sharded: each rank keeps and updates 1/world_size of them, and gathers the
// parameters. It sends as many bytes as ddp, or (k+1)/2 times as many if each of k micro-batches is reduced. Only for
// element-wise optimizers, and not for manual optimisation. Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO,
// stages 1 and 2); Baines et al. 2021 (FairScale).
struct DdpSharded {
  static constexpr std::string_view kName = "ddp_sharded";
  int64_t stage = 2;                        // 2: shard gradients and state; 1: shard state alone
  std::string reduce = "each_micro_batch";  // or at_boundary: sends less when gradients accumulate, but keeps all
  double bucket_cap_mib = 25;               // this and the following as in Ddp
  double first_bucket_mib = 1;
  bool broadcast_buffers = true;
  double timeout_s = 1800;
  double connect_timeout_s = 300;
  void describe(FieldVisitor& visit);
};

// ddp_sharded with gradients, optimizer state and the update on the host: of the model state a device keeps only its
// parameters in the training precision, and the buckets of gradients that are on their way to the host. Works with
// one device, too. Values written to a parameter between steps are overwritten. Only for element-wise optimizers, and
// not for manual optimisation. On a CPU it saves nothing and takes 20 bytes per parameter against 16: use it on
// machines with a GPU, and in tests.
// Source: Ren et al. 2021, arXiv:2101.06840; Lian et al. 2023 for `ratio` (twin-flow).
struct ZeroOffload {
  static constexpr std::string_view kName = "zero_offload";
  double ratio = 1;                         // share of the elements with state on the host; 0 is ddp_sharded
  int64_t update_threads = 0;               // per rank, for the update on the host; 0: cores / local ranks, less
                                            // 4 with a GPU
  std::string reduce = "each_micro_batch";  // this and the following as in DdpSharded
  double bucket_cap_mib = 25;
  double first_bucket_mib = 1;
  bool broadcast_buffers = true;
  double timeout_s = 1800;
  double connect_timeout_s = 300;
  void describe(FieldVisitor& visit);
};

// `base` with each update delayed by one step, so that it runs concurrently with the next step: the parameters of
// step i+1 hold the gradients up to those of step i-1. Converges for smaller learning rates than the synchronous
// update (on a quadratic up to half of them); let the first steps be synchronous. Source: Ren et al. 2021,
// arXiv:2101.06840, section 5.2.
struct DelayedUpdate {
  static constexpr std::string_view kName = "delayed_update";
  std::string base = "zero_offload";        // or ddp_sharded, ddp, single_device
  int64_t warmup_steps = 0;                 // synchronous steps at the beginning
  bool drain_before_save = false;           // checkpoints first complete the update in progress: changes training
  double ratio = 1;                         // only for base zero_offload
  int64_t update_threads = 0;               // as in ZeroOffload
  std::string reduce = "each_micro_batch";  // this and the following as in DdpSharded
  double bucket_cap_mib = 25;
  double first_bucket_mib = 1;
  bool broadcast_buffers = true;
  double timeout_s = 1800;
  double connect_timeout_s = 300;
  void describe(FieldVisitor& visit);
};

}  // namespace fulgur
