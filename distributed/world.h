#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "distributed/c10d_collective.h"
#include "distributed/cluster_environment.h"
#include "distributed/collective.h"
#include "distributed/network.h"

namespace fulgur {

struct WorldOptions {
  c10::Device device = c10::kCPU;         // of this rank: see C10dCollective
  double timeout_s = 1800;                // of every collective
  double connect_timeout_s = 300;         // until every rank has come; again, until they are connected
  double heartbeat_interval_s = 0.4;      // a rank whose heartbeat stops is found dead after two where a collective
                                          // fails, and ends the run after Heartbeat::kSilentIntervals of them
  std::function<void()> while_meeting{};  // called now and then until every rank has come; may throw to end that
  C10dOptions collectives{};
};

// All ranks of a run, connected: a group for the large exchanges of training, and one for the small ones (metrics, the
// end of a step, barriers), which would else wait behind them. The small ones are tensors on the CPU, whatever the
// device. Used by one thread, but for abort().
class World {
 public:
  World();  // of one rank: every collective is the identity

  // Of groups that exist already.
  World(std::shared_ptr<Collective> data, std::shared_ptr<Collective> control);

  // Meets the other ranks where the environment says. Throws DistributedError naming the ranks that do not come and, if
  // the master cannot be reached or its port is in use, what to change.
  explicit World(const ClusterEnvironment& environment, const WorldOptions& options = {});

  // Of ranks that share a store already, as threads of one process do. `store_rank`: see Heartbeat.
  World(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank,
        Network network, const WorldOptions& options);

  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int64_t rank() const;
  int64_t world_size() const;
  Collective& data();
  Collective& control();

  void set_step(int64_t global_step);  // for the error messages of other ranks

  // This rank gives up: the others learn why and stop, as do its own collectives. Call it before the World goes in an
  // exception, else the others only see a rank that has left. From any thread.
  void abort(std::string_view reason);

  // Waits until every rank is here: the last thing to do in a run that went well.
  void leave();

  // After a failure: if the store lives in this process, waits a few seconds for the others to read why, and to end.
  void wait_for_others();

 private:
  struct Parts;
  struct Stores;
  static World connected(const ClusterEnvironment& environment, const WorldOptions& options);
  World(const Stores& stores, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank, Network network,
        const WorldOptions& options);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fulgur
