#pragma once

#include <string>
#include <string_view>

#include "fulgur/base/describe.h"

namespace fulgur {

struct EngineOptions;

// Distributed data parallel: a process for each device, each with the whole model and its part of every batch.
// Source: Li et al. 2020, arXiv:2006.15704.
struct Ddp {
  static constexpr std::string_view kName = "ddp";
  // Size of gradients that are reduced together; smaller: starts sooner, costs more calls.
  // On CPUs `ddp` reduces a gradient of 1 MiB or more by itself, where autograd made it, unless `wire` is bf16.
  double bucket_cap_mib = 25;
  double first_bucket_mib = 1;     // cap of the first bucket, so that reducing starts early in backward
  std::string wire = "fp32";       // or bf16: fp32 gradients travel in half the bytes, and their sums are rounded to it
  std::string transport = "auto";  // or shared_memory, gloo or mpi: what moves tensors in host memory
  bool broadcast_buffers = true;   // after each step rank 0 broadcasts buffers (running means)
  double timeout_s = 1800;         // limit for every collective
  double connect_timeout_s = 300;  // limit until every rank has joined, then again until all are connected
  double heartbeat_timeout_s = 60;  // limit for a rank that gives no sign of life
  void describe(FieldVisitor& visit);
  EngineOptions engine_options() const;
};

// How ranks connect and reduce: the settings of ddp, which all presets with ranks have as `ranks`. Their flags are the
// same, too: --strategy.bucket_cap_mib=10 sets ddp's bucket_cap_mib or ddp_sharded's ranks.bucket_cap_mib.
using RankOptions = Ddp;

}  // namespace fulgur
