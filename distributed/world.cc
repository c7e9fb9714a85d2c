#include "distributed/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <future>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "distributed/detached_call.h"
#include "distributed/gloo_adapter.h"
#include "distributed/heartbeat.h"
#include "distributed/local_collective.h"
#include "distributed/nccl_adapter.h"

namespace fulgur {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds to_milliseconds(double seconds) { return milliseconds(static_cast<int64_t>(seconds * 1000)); }

// Writing to a peer that has gone must be an error, not a signal that ends the process.
void ignore_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

// c10d's recorder of past collectives, shared by all groups of a process, adds a group that is new to it without taking
// its lock: threads that each begin with their own group (Transfers have a thread) break its map. Still so in torch
// 2.11 (FlightRecorder::recordWithResetEnabled). Nothing here reads the records.
void turn_flight_recorder_off() {
  static const int done = ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  static_cast<void>(done);
}

// NCCL's watchdog in c10d cleans up after an error and leaves the report to the process (2); it neither writes dumps
// nor ends a process whose watchdog seems to hang.
void leave_errors_of_nccl_to_us() {
  static const int done = [] {
    ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
    ::setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
    return ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  }();
  static_cast<void>(done);
}

// Hosts of a cluster start at different times, so the master's name may be unknown for a while, except on the master's
// own host.
void wait_for_name(const ClusterEnvironment& environment, const WorldOptions& options, Clock::time_point deadline) {
  const bool is_masters_host = environment.rank == environment.local_rank;
  if (is_masters_host) return;
  while (may_be_known_later(environment.master_address) && Clock::now() < deadline) {
    if (options.while_meeting) options.while_meeting();
    std::this_thread::sleep_for(milliseconds(100));
  }
}

// Lets the ranks of a run meet at a store. run() blocks forever if rank 0 hangs or another program listens at its port:
// call it by detached_call().
class Meeting {
 public:
  Meeting(const ClusterEnvironment& environment, const WorldOptions& options, Clock::time_point deadline)
      : environment_(environment),
        timeout_(to_milliseconds(options.connect_timeout_s)),
        deadline_(deadline),
        place_(fmt::format("{} port {}", environment.master_address, environment.master_port)) {}

  // Returns the store after every rank has joined.
  Store run() {
    if (!is_server()) wait_until_somebody_listens();
    Store store = open_store();
    if (!environment_.store_prefix.empty()) store = of_this_run(store);
    wait_for_all(*store);
    return store;
  }

  void give_up() { given_up_ = true; }
  bool is_late() const { return Clock::now() > deadline_ + milliseconds(500); }

  DistributedError no_answer() const {
    if (is_server())
      return DistributedError(fmt::format("rank 0: the ranks did not meet within {:g} s", seconds(timeout_)));
    return cannot_reach(
        "something listens there, but does not answer; does rank 0 hang, or is the port that of another program?");
  }

 private:
  bool is_server() const { return environment_.rank == 0 && !environment_.launcher_keeps_store; }
  bool is_over() const { return given_up_ || Clock::now() > deadline_; }

  DistributedError cannot_reach(std::string_view cause) const {
    return DistributedError(fmt::format("rank {} cannot reach rank 0 at {} within {:g} s: {}; check MASTER_ADDR, "
                                        "MASTER_PORT and that rank 0 has been started",
                                        environment_.rank, place_, seconds(timeout_), cause),
                            0);
  }

  void wait_until_somebody_listens() const {
    while (const auto why = why_nobody_listens(environment_.master_address, environment_.master_port)) {
      if (is_over()) throw cannot_reach(*why);
      std::this_thread::sleep_for(milliseconds(50));
    }
  }

  Store open_store() const {
    c10d::TCPStoreOptions store;
    store.port = environment_.master_port;
    store.isServer = is_server();
    store.waitWorkers = false;
    store.timeout = timeout_;
    store.masterListenFd = environment_.listening_descriptor;
    try {
      return c10::make_intrusive<c10d::TCPStore>(environment_.master_address, store);
    } catch (const c10::Error& error) {
      const std::string whole = error.what_without_backtrace();
      const std::string cause = whole.substr(0, whole.find('\n'));
      if (!is_server()) throw cannot_reach(cause);
      throw DistributedError(fmt::format("rank 0 cannot listen at {}: {}; choose another MASTER_PORT", place_, cause),
                             0);
    }
  }

  // A store that outlives runs still has the keys of earlier runs. Every rank takes part in the same runs, so all ranks
  // count the same number for this run.
  Store of_this_run(const Store& store) const {
    const auto restart = c10::make_intrusive<c10d::PrefixStore>(environment_.store_prefix, store);
    const int64_t number = restart->add(fmt::format("runs/{}", environment_.rank), 1);
    return c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}{}/", environment_.store_prefix, number), store);
  }

  // Throws an error that names the ranks that have not joined in time.
  void wait_for_all(c10d::Store& store) const {
    const auto key = [](int64_t rank) { return fmt::format("joined/{}", rank); };
    std::vector<std::string> keys;
    for (int64_t rank = 0; rank < environment_.world_size; ++rank) keys.push_back(key(rank));
    try {
      store.set(key(environment_.rank), std::string("1"));
      for (milliseconds pause{2}; !store.check(keys); pause = std::min(2 * pause, milliseconds(100))) {
        if (is_over()) throw not_come(store, keys);
        std::this_thread::sleep_for(pause);
      }
    } catch (const c10::Error&) {
      throw DistributedError(
          fmt::format("rank {}: rank 0 ended, or gave up, while the ranks met at {}", environment_.rank, place_), 0);
    }
  }

  DistributedError not_come(c10d::Store& store, const std::vector<std::string>& keys) const {
    std::vector<size_t> missing;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      if (!store.check({keys[rank]})) missing.push_back(rank);
    }
    const std::optional<int64_t> first =
        missing.empty() ? std::nullopt : std::optional(static_cast<int64_t>(missing.front()));
    return DistributedError(
        fmt::format("rank {}: of {} ranks, {} {} not come within {:g} s", environment_.rank, environment_.world_size,
                    fmt::join(missing, ", "), missing.size() == 1 ? "has" : "have", seconds(timeout_)),
        first);
  }

  static double seconds(milliseconds time) { return static_cast<double>(time.count()) / 1000; }

  const ClusterEnvironment environment_;
  const milliseconds timeout_;
  const Clock::time_point deadline_;
  const std::string place_;
  std::atomic<bool> given_up_{false};
};

}  // namespace

// Two connections to the same store, so that a call that waits on one does not block the other.
struct World::Stores {
  Store for_groups;
  Store for_heartbeat;

  static Stores of(const Store& store) { return {store, store->clone()}; }
  static Stores met(const ClusterEnvironment& environment, const WorldOptions& options, Clock::time_point deadline);
};

World::Stores World::Stores::met(const ClusterEnvironment& environment, const WorldOptions& options,
                                 Clock::time_point deadline) {
  const auto meeting = std::make_shared<Meeting>(environment, options, deadline);
  std::future<Stores> stores = detached_call<Stores>([meeting] { return of(meeting->run()); });
  try {
    while (stores.wait_for(milliseconds(10)) != std::future_status::ready) {
      if (options.while_meeting) options.while_meeting();
      if (meeting->is_late()) throw meeting->no_answer();
    }
  } catch (...) {
    meeting->give_up();
    throw;
  }
  return stores.get();
}

struct World::Parts {
  std::vector<int64_t> ranks{};
  std::shared_ptr<Heartbeat> heartbeat{};
  std::shared_ptr<Collective> data{};
  std::shared_ptr<Collective> control{};

  // Interrupts this rank's collectives when another rank fails, even if no call of this rank fails by itself.
  void watch() const {
    const std::vector<std::weak_ptr<Collective>> groups{data, control};
    heartbeat->watch(static_cast<int64_t>(ranks.size()), [groups] {
      for (const auto& group : groups) {
        if (const auto there = group.lock()) static_cast<C10dCollective&>(*there).interrupt();
      }
    });
  }

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
    : World(environment.world_size == 1 ? World() : connected(environment, options)) {}

World World::connected(const ClusterEnvironment& environment, const WorldOptions& options) {
  const EnvironmentVariables variables = process_environment_variables();
  const Clock::time_point deadline = Clock::now() + to_milliseconds(options.connect_timeout_s);
  wait_for_name(environment, options, deadline);
  Network network = choose_network(variables, environment.master_address, environment.master_port,
                                   environment.local_world_size < environment.world_size);
  WorldOptions chosen = options;
  chosen.collectives.shared_memory = options.collectives.shared_memory && allows_shared_memory(variables);
  const std::optional<int64_t> store_rank = environment.launcher_keeps_store ? std::nullopt : std::optional<int64_t>(0);
  return World(Stores::met(environment, chosen, deadline), environment.rank, environment.world_size, store_rank,
               std::move(network), chosen);
}

World::World(Store store, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank, Network network,
             const WorldOptions& options)
    : World(Stores::of(store), rank, world_size, store_rank, std::move(network), options) {}

World::World(const Stores& stores, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank, Network network,
             const WorldOptions& options)
    : parts_(std::make_unique<Parts>()) {
  ignore_broken_pipes();
  turn_flight_recorder_off();
  leave_errors_of_nccl_to_us();
  parts_->heartbeat = std::make_shared<Heartbeat>(stores.for_heartbeat, rank, store_rank,
                                                  to_milliseconds(options.heartbeat_interval_s));
  parts_->ranks.resize(static_cast<size_t>(world_size));
  std::iota(parts_->ranks.begin(), parts_->ranks.end(), 0);
  Group group{.name = "data",
              .store = stores.for_groups,
              .ranks = parts_->ranks,
              .rank = rank,
              .timeout = to_milliseconds(options.timeout_s),
              .connect_timeout = to_milliseconds(options.connect_timeout_s),
              .device = options.device};
  const Connect gloo = connect_gloo(network);
  parts_->data = std::make_shared<C10dCollective>(group, options.device.is_cpu() ? gloo : connect_nccl(network),
                                                  parts_->heartbeat, options.collectives);
  group.name = "control";
  group.device = c10::kCPU;
  parts_->control = std::make_shared<C10dCollective>(group, gloo, parts_->heartbeat, options.collectives);
  if (world_size > 1) parts_->watch();
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

void World::leave() {
  if (parts_->heartbeat) parts_->heartbeat->set_at_end();
  parts_->control->barrier();
}

void World::wait_for_others() {
  if (parts_->heartbeat) parts_->heartbeat->wait_for_others(parts_->ranks);
}

}  // namespace fulgur
