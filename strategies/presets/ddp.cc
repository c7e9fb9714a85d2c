#include "fulgur/strategies/presets/ddp.h"

#include <c10/core/ScalarType.h>
#include <algorithm>

#include <cstdint>
#include <optional>

#include "fulgur/base/names.h"
#include "fulgur/distributed/to_milliseconds.h"
#include "fulgur/strategies/engine/engine_options.h"

namespace fulgur {
namespace {

TransportKind transport_of(std::string_view text) {
  const std::string name = canonical_name(text);
  if (name == "shared_memory") return TransportKind::shared_memory;
  if (name == "gloo") return TransportKind::gloo;
  if (name == "mpi") return TransportKind::mpi;
  return TransportKind::automatic;
}

int64_t to_bytes(double mib) {
  constexpr double kMost = 1LL << 40;  // MiB; infinity is more
  return static_cast<int64_t>(std::min(mib, kMost) * (1 << 20));
}

}  // namespace

void Ddp::describe(FieldVisitor& visit) {
  visit({.name = "bucket_cap_mib", .help = "size of gradients that are reduced together", .unit = "MiB", .min = 0},
        &bucket_cap_mib);
  visit(
      {.name = "first_bucket_mib", .help = "size of the first gradients reduced in backward", .unit = "MiB", .min = 0},
      &first_bucket_mib);
  visit({.name = "wire",
         .help = "type in which the gradients of fp32 parameters travel between ranks; bf16 takes half the bytes, and "
                 "rounds gradients and their sums",
         .choices = {"fp32", "bf16"}},
        &wire);
  visit({.name = "transport",
         .help =
             "what moves tensors in host memory between ranks; auto: shared memory within a host, Gloo between hosts; "
             "mpi: in a program with @fulgur//distributed:mpi_transport whose ranks mpirun or srun has started",
         .choices = {"auto", "shared_memory", "gloo", "mpi"}},
        &transport);
  visit({.name = "broadcast_buffers", .help = "broadcast the buffers of rank 0 after each step"}, &broadcast_buffers);
  visit({.name = "timeout_s",
         .help = "abort a collective after this time",
         .unit = "s",
         .min = 1,
         .max = kLongestTimeoutS},
        &timeout_s);
  visit({.name = "connect_timeout_s",
         .help = "abort if not every rank connects in this time",
         .unit = "s",
         .min = 1,
         .max = kLongestTimeoutS},
        &connect_timeout_s);
  visit({.name = "heartbeat_timeout_s",
         .help = "abort if a rank gives no sign of life for this time, because its host has vanished or its process is "
                 "stopped",
         .unit = "s",
         .min = 2,
         .max = kLongestTimeoutS},
        &heartbeat_timeout_s);
}

EngineOptions Ddp::engine_options() const {
  return {.world = WorldOptions{.timeout_s = timeout_s,
                                .connect_timeout_s = connect_timeout_s,
                                .heartbeat_timeout_s = heartbeat_timeout_s,
                                .collectives = {.kind = transport_of(transport)}},
          .buckets = {.first_bucket_bytes = to_bytes(first_bucket_mib), .bucket_cap_bytes = to_bytes(bucket_cap_mib)},
          .wire = canonical_name(wire) == "bf16" ? std::optional(c10::ScalarType::BFloat16) : std::nullopt,
          .broadcast_buffers = broadcast_buffers};
}

}  // namespace fulgur
