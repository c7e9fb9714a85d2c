#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fulgur {

enum class TransportKind { automatic, shared_memory, gloo, mpi };

// How ranks exchange tensors in host memory.
struct TransportOptions {
  TransportKind kind = TransportKind::automatic;  // automatic: shared memory within a host, Gloo between hosts; any
                                                  // other: this transport only, otherwise connecting fails
  bool shared_memory = true;               // shared memory between CPU ranks of one host, if possible; otherwise Gloo
  std::string host_id{};                   // ranks with different ones count as ranks of different hosts
  bool rank_order_all_reduce = false;      // Gloo adds an all_reduce in the order of ranks, too: the same bits as
                                           // reduce_scatter, at any world size, wherever the tensor begins
  std::optional<int64_t> staging_bytes{};  // memory of a large collective for data in transit; default: 1 MiB of shared
                                           // memory per rank, or 128 KiB for each other rank if that is more; 8 MiB
                                           // with Gloo; 4 MiB of a tensor go between hosts at a time
  int64_t num_threads = 1;                 // threads of a group: they add and copy large tensors in place

  bool may_use(TransportKind one) const { return kind == TransportKind::automatic || kind == one; }
};

}  // namespace fulgur
