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
// parameters. The bytes on the wire are those of ddp. Only for element-wise optimizers, and not for manual
// optimisation. Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stages 1 and 2); Baines et al. 2021
// (FairScale).
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

}  // namespace fulgur
