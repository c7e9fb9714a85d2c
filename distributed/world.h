#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/distributed/network.h"
#include "fulgur/distributed/transport_options.h"

namespace fulgur {

struct WorldStores;  // distributed/world_stores.h

struct WorldOptions {
  c10::Device device = c10::kCPU;     // where the tensors of the data group are
  double timeout_s = 1800;            // limit for each collective
  double connect_timeout_s = 300;     // limit until every rank has joined, then again until all are connected
  double heartbeat_interval_s = 0.4;  // when a collective fails, a silent rank is found dead after two intervals
  double heartbeat_timeout_s = 60;    // without a failure, a silent rank is found dead after this time
  TransportOptions collectives{};
};

// All ranks of a run, connected: one group for the large exchanges of training, and one for small exchanges (metrics,
// the end of a step, barriers), which would otherwise wait for the large ones. The small group takes CPU tensors,
// whatever the device. Threading: one thread, except for abort().
class World {
 public:
  World();  // a single rank: every collective is the identity

  // A world of groups that exist already.
  World(std::shared_ptr<Collective> data, std::shared_ptr<Collective> control);

  // Connects ranks that share a store already: threads of one process, or processes that have met, see
  // launch/rendezvous.h. `store_rank`: see Heartbeat.
  World(const WorldStores& stores, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank,
        NetworkInterface network, const WorldOptions& options);

  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int64_t rank() const;
  int64_t world_size() const;
  Collective& data();
  Collective& control();

  // The ranks, divided into groups of consecutive ranks, as this rank sees them.
  struct Groups {
    // This rank's group.
    std::shared_ptr<Collective> within;
    // The ranks that have the same position in their groups as this rank, in the order of the groups.
    std::shared_ptr<Collective> across;
  };

  // Connects groups of group_size ranks, which divides the world size, for tensors as data() takes them. Every rank
  // calls it. Later calls return what the first one made, which lasts as long as the World.
  const Groups& groups_of(int64_t group_size);

  void set_step(int64_t global_step);  // for the error messages of other ranks

  // Where each rank was when a failure was diagnosed, as sentences (Heartbeat::places); empty for a single rank.
  std::vector<std::string> places() const;

  // Aborts the run: the other ranks learn the reason and stop, as do this rank's own collectives. Call it before an
  // exception destroys the World; otherwise the others only see that a rank has left. Threading: any thread.
  void abort(const std::string& reason);

  // Waits until every rank has called it: the last call in a run without errors.
  void leave();

  // To be called after a failure: if the store lives in this process, waits a few seconds for the others to read the
  // reason and to end.
  void wait_for_others();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace fulgur
