#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fulgur {

// A set of ranks, and what is needed to connect them.
struct Group {
  std::string name;                       // unique among the groups of a run; appears in errors
  c10::intrusive_ptr<c10d::Store> store;  // shared by the whole run
  std::vector<int64_t> ranks;             // global ranks, in the group's order
  int64_t rank = 0;                       // index of this rank in `ranks`
  std::chrono::milliseconds timeout{};    // limit for each collective
  std::chrono::milliseconds connect_timeout = timeout;
  c10::Device device = c10::kCPU;  // where the tensors of this rank are

  int64_t world_size() const { return static_cast<int64_t>(ranks.size()); }
};

// Connects this rank to the others of the group, which make the same call.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(const Group& group)>;

}  // namespace fulgur
