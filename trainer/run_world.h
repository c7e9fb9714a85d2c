#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/launch/session.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// The ranks of one run: this process alone, the ranks of its session, or threads that a test has connected. A single
// rank joins no session, so that its failure ends no other process.
class RunWorld {
 public:
  // Joins the other ranks if the strategy has a rank for each of several devices. `devices` are those of each machine.
  RunWorld(const Strategy& strategy, const std::vector<c10::Device>& devices, int64_t num_nodes);

  World& world() { return *world_; }
  int64_t rank() const { return rank_; }
  int64_t local_rank() const { return local_rank_; }  // among the ranks of this machine
  int64_t world_size() const { return world_size_; }
  const std::vector<c10::Device>& devices() const { return devices_; }  // used by this process

  void abort(const std::string& reason);  // aborts all ranks; the caller then calls leave(failure)

  // Called once, at the end of the run. Throws `failure`, or the failure of the rank that caused it; null: no failure.
  void leave(std::exception_ptr failure);

 private:
  std::optional<World> local_world_;
  World* world_ = nullptr;
  Session* session_ = nullptr;  // owns world_; null: world_ is local_world_ or a ScopedThreadWorld
  int64_t rank_ = 0, local_rank_ = 0, world_size_ = 1;
  std::vector<c10::Device> devices_;
};

}  // namespace fulgur
