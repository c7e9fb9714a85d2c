#include "fulgur/strategies/preset_options.h"

namespace fulgur {
namespace {

template <class Options>
void describe_ranks(Options& options, FieldVisitor& visit) {
  visit({.name = "bucket_cap_mib", .help = "size of gradients that are reduced together, MiB", .min = 0},
        &options.bucket_cap_mib);
  visit({.name = "first_bucket_mib", .help = "size of the first gradients reduced in backward, MiB", .min = 0},
        &options.first_bucket_mib);
  visit({.name = "broadcast_buffers", .help = "broadcast the buffers of rank 0 after each step"},
        &options.broadcast_buffers);
  visit({.name = "timeout_s", .help = "abort a collective after this time, s", .min = 1}, &options.timeout_s);
  visit({.name = "connect_timeout_s", .help = "abort if not every rank connects in this time, s", .min = 1},
        &options.connect_timeout_s);
}

void describe_reduce(std::string& reduce, FieldVisitor& visit) {
  visit({.name = "reduce",
         .help = "when gradients are reduced over ranks",
         .choices = {"each_micro_batch", "at_boundary"}},
        &reduce);
}

template <class Options>
void describe_host(Options& options, FieldVisitor& visit) {
  visit({.name = "ratio", .help = "share of the optimizer's state that is on the host", .min = 0, .max = 1},
        &options.ratio);
  visit({.name = "update_threads",
         .help = "threads for the update on the host; 0: cores / local ranks, less 4 with a GPU",
         .min = 0},
        &options.update_threads);
}

}  // namespace

void Ddp::describe(FieldVisitor& visit) { describe_ranks(*this, visit); }

void DdpSharded::describe(FieldVisitor& visit) {
  visit({.name = "stage",
         .help = "what is sharded; 2: gradients and optimizer state, 1: state alone",
         .min = 1,
         .max = 2},
        &stage);
  describe_reduce(reduce, visit);
  describe_ranks(*this, visit);
}

void ZeroOffload::describe(FieldVisitor& visit) {
  describe_host(*this, visit);
  describe_reduce(reduce, visit);
  describe_ranks(*this, visit);
}

void DelayedUpdate::describe(FieldVisitor& visit) {
  visit({.name = "base", .help = "strategy whose updates are delayed: zero_offload, ddp_sharded, ddp or single_device"},
        &base);
  visit({.name = "warmup_steps", .help = "number of synchronous steps at the beginning", .min = 0}, &warmup_steps);
  visit({.name = "drain_before_save", .help = "complete the update in progress before a checkpoint"},
        &drain_before_save);
  describe_host(*this, visit);
  describe_reduce(reduce, visit);
  describe_ranks(*this, visit);
}

}  // namespace fulgur
