#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/distributed/network.h"
#include "fulgur/distributed/transport_options.h"

namespace fulgur {

// A set of ranks, and what is needed to connect them.
struct GroupConfig {
  std::string name;                       // unique among the groups of a run; appears in errors
  c10::intrusive_ptr<c10d::Store> store;  // shared by the whole run
  std::vector<int64_t> ranks;             // global ranks, in the group's order
  int64_t rank = 0;                       // index of this rank in `ranks`
  std::chrono::milliseconds timeout{};    // limit for each collective
  std::chrono::milliseconds connect_timeout = timeout;
  c10::Device device = c10::kCPU;  // where the tensors of this rank are
  NetworkInterface network{};      // where this rank accepts connections
  TransportOptions transport{};

  int64_t world_size() const { return static_cast<int64_t>(ranks.size()); }

  // Part of the group, with the same options; `rank` is one of `places`, which are indices of this group's ranks.
  GroupConfig part(const std::string& name_of_part, const std::vector<int64_t>& places) const;
};

// Throws UsageError, on every rank, if some rank cannot use the transport that strategy.transport names: the message
// says which ranks, and why. `why_not` is this rank's reason; empty if it can. Every rank calls it.
void check_every_rank_can(const GroupConfig& group, std::string_view transport, const std::string& why_not);

// Tells the other ranks of the group a text, and returns the texts of all, by rank. `what` is unique among the
// exchanges of the group. Throws what the store throws if a rank has not called it within the group's connect_timeout.
std::vector<std::string> exchange_texts(const GroupConfig& group, std::string_view what, const std::string& mine);

// Called by every rank before it fails for what the exchange of `what` has told all of them. Returns when all know: the
// end of rank 0, which may keep the store, would otherwise be all that the others learn.
void wait_until_all_know(const GroupConfig& group, std::string_view what);

}  // namespace fulgur
