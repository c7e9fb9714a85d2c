#include "distributed/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "core/error.h"
#include "distributed/gloo_adapter.h"
#include "distributed/heartbeat.h"
#include "distributed/local_collective.h"
#include "distributed/nccl_adapter.h"

namespace fulgur {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

milliseconds to_milliseconds(double seconds) { return milliseconds(static_cast<int64_t>(seconds * 1000)); }

// A peer that has gone must be an error of a write, not a signal that ends the process.
void ignore_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

// c10d's recorder of past collectives, one for all groups of a process, notes a group that is new to it without taking
// its lock: threads that each begin with a group of their own (Transfers have a thread) break its map. Still so in
// torch 2.11 (FlightRecorder::recordWithResetEnabled). Nothing here reads it.
void turn_flight_recorder_off() {
  static const int done = ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  static_cast<void>(done);
}

Store open_store(const ClusterEnvironment& environment, const WorldOptions& options) {
  c10d::TCPStoreOptions store;
  store.port = environment.master_port;
  store.isServer = environment.rank == 0 && !environment.launcher_keeps_store;
  store.waitWorkers = false;
  store.timeout = to_milliseconds(options.connect_timeout_s);
  store.masterListenFd = environment.listening_descriptor;
  const std::string place = fmt::format("{} port {}", environment.master_address, environment.master_port);
  try {
    return c10::make_intrusive<c10d::TCPStore>(environment.master_address, store);
  } catch (const c10::Error& error) {
    const std::string whole = error.what_without_backtrace();
    const std::string cause = whole.substr(0, whole.find('\n'));
    if (store.isServer) {
      throw DistributedError(fmt::format("rank 0 cannot listen at {}: {}; choose another MASTER_PORT", place, cause),
                             0);
    }
    throw DistributedError(
        fmt::format("rank {} cannot reach rank 0 at {} within {} s: {}; check MASTER_ADDR, MASTER_PORT "
                    "and that rank 0 has been started",
                    environment.rank, place, options.connect_timeout_s, cause),
        0);
  }
}

// Returns when every rank has called it; names those that have not.
void wait_for_all(c10d::Store& store, int64_t rank, int64_t world_size, milliseconds timeout) {
  const auto key = [](int64_t other) { return fmt::format("joined/{}", other); };
  std::vector<std::string> keys;
  for (int64_t other = 0; other < world_size; ++other) keys.push_back(key(other));
  store.set(key(rank), std::string("1"));
  try {
    store.wait(keys, timeout);
  } catch (const c10::Error&) {
    std::vector<int64_t> missing;
    for (int64_t other = 0; other < world_size; ++other) {
      if (!store.check({key(other)})) missing.push_back(other);
    }
    if (missing.empty()) return;
    throw DistributedError(
        fmt::format("rank {}: of {} ranks, {} {} not come within {:.1f} s", rank, world_size, fmt::join(missing, ", "),
                    missing.size() == 1 ? "has" : "have", static_cast<double>(timeout.count()) / 1000),
        missing.front());
  }
}

Store join(const ClusterEnvironment& environment, const WorldOptions& options) {
  Store store = open_store(environment, options);
  if (!environment.store_prefix.empty())
    store = c10::make_intrusive<c10d::PrefixStore>(environment.store_prefix, store);
  wait_for_all(*store, environment.rank, environment.world_size, to_milliseconds(options.connect_timeout_s));
  return store;
}

}  // namespace

struct World::Parts {
  std::shared_ptr<Heartbeat> heartbeat{};
  std::shared_ptr<Collective> data{};
  std::shared_ptr<Collective> control{};

  void abort(std::string_view reason) {
    if (!heartbeat) return;
    heartbeat->report_failure(std::string(reason));
    for (const auto& group : {data, control}) static_cast<C10dCollective&>(*group).abort(reason);
  }
};

World::World() : World(std::make_shared<LocalCollective>(), std::make_shared<LocalCollective>()) {}

World::World(std::shared_ptr<Collective> data, std::shared_ptr<Collective> control)
    : parts_(std::make_unique<Parts>()) {
  parts_->data = std::move(data);
  parts_->control = std::move(control);
}

World::World(const ClusterEnvironment& environment, const WorldOptions& options)
    : World(environment.world_size == 1
                ? World()
                : World(join(environment, options), environment.rank, environment.world_size,
                        environment.launcher_keeps_store ? std::nullopt : std::optional<int64_t>(0),
                        choose_network(process_environment_variables(), environment.master_address,
                                       environment.master_port),
                        options)) {}

World::World(Store store, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank, Network network,
             const WorldOptions& options)
    : parts_(std::make_unique<Parts>()) {
  ignore_broken_pipes();
  turn_flight_recorder_off();
  parts_->heartbeat =
      std::make_shared<Heartbeat>(store->clone(), rank, store_rank, to_milliseconds(options.heartbeat_interval_s));
  Group group{.name = "data",
              .store = store,
              .ranks = std::vector<int64_t>(static_cast<size_t>(world_size)),
              .rank = rank,
              .timeout = to_milliseconds(options.timeout_s),
              .device = options.device};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  const Connect gloo = connect_gloo(std::move(network));
  parts_->data = std::make_shared<C10dCollective>(group, options.device.is_cpu() ? gloo : connect_nccl(),
                                                  parts_->heartbeat, options.collectives);
  group.name = "control";
  group.device = c10::kCPU;
  parts_->control = std::make_shared<C10dCollective>(group, gloo, parts_->heartbeat, options.collectives);
}

World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

int64_t World::rank() const { return parts_->control->rank(); }
int64_t World::world_size() const { return parts_->control->world_size(); }
Collective& World::data() { return *parts_->data; }
Collective& World::control() { return *parts_->control; }

void World::set_step(int64_t global_step) {
  if (parts_->heartbeat) parts_->heartbeat->set_step(global_step);
}

void World::abort(std::string_view reason) { parts_->abort(reason); }
void World::leave() { parts_->control->barrier(); }

}  // namespace fulgur
