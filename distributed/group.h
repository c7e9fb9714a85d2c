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

// What the connections between some ranks are made from.
struct Group {
  std::string name;                       // stands in errors; unique among the groups of a run
  c10::intrusive_ptr<c10d::Store> store;  // of the whole run
  std::vector<int64_t> ranks;             // numbers in the run, in the group's order
  int64_t rank = 0;                       // this rank's place in `ranks`
  std::chrono::milliseconds timeout{};    // of every collective
  std::chrono::milliseconds connect_timeout = timeout;
  c10::Device device = c10::kCPU;  // where this rank's tensors are

  int64_t world_size() const { return static_cast<int64_t>(ranks.size()); }
};

// Connects this rank to the others of the group, which do the same.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(const Group& group)>;

}  // namespace fulgur
