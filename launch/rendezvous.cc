#include "fulgur/launch/rendezvous.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "fulgur/base/environment_variables.h"
#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/distributed/detached_call.h"
#include "fulgur/distributed/network.h"
#include "fulgur/distributed/world_stores.h"
#include "fulgur/launch/launcher.h"
#include "fulgur/launch/open_files.h"

namespace fulgur {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds to_milliseconds(double seconds) { return milliseconds(static_cast<int64_t>(seconds * 1000)); }

// Hosts of a cluster start at different times, so the master's name may be unknown for a while, except on the master's
// own host.
void wait_for_name(const ClusterEnvironment& environment, const std::function<void()>& while_meeting,
                   Clock::time_point deadline) {
  const bool is_masters_host = environment.rank == environment.local_rank;
  if (is_masters_host) return;
  while (may_be_known_later(environment.master_address) && Clock::now() < deadline) {
    while_meeting();
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
      store.add("num_joined", 1);  // to ask for one number is less work for the store than to ask for every key
      const auto has_everyone = [&] {
        return store.add("num_joined", 0) >= environment_.world_size && store.check(keys);
      };
      for (milliseconds pause{2}; !has_everyone(); pause = std::min(2 * pause, milliseconds(100))) {
        if (is_over()) return throw_if_any_misses(store, keys);
        std::this_thread::sleep_for(pause);
      }
    } catch (const c10::Error&) {
      throw DistributedError(
          fmt::format("rank {}: rank 0 ended, or gave up, while the ranks met at {}", environment_.rank, place_), 0);
    }
  }

  void throw_if_any_misses(c10d::Store& store, const std::vector<std::string>& keys) const {
    std::vector<size_t> missing;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      if (!store.check({keys[rank]})) missing.push_back(rank);
    }
    if (missing.empty()) return;  // the last one has come since
    throw DistributedError(
        fmt::format("rank {}: of {} ranks, {} {} not come within {:g} s", environment_.rank, environment_.world_size,
                    fmt::join(missing, ", "), missing.size() == 1 ? "has" : "have", seconds(timeout_)),
        static_cast<int64_t>(missing.front()));
  }

  static double seconds(milliseconds time) { return static_cast<double>(time.count()) / 1000; }

  const ClusterEnvironment environment_;
  const milliseconds timeout_;
  const Clock::time_point deadline_;
  const std::string place_;
  std::atomic<bool> given_up_{false};
};

// Returns the store at which all ranks have met.
WorldStores meet(const ClusterEnvironment& environment, const WorldOptions& options,
                 const std::function<void()>& while_meeting, Clock::time_point deadline) {
  const auto meeting = std::make_shared<Meeting>(environment, options, deadline);
  std::future<WorldStores> stores = detached_call<WorldStores>([meeting] { return WorldStores(meeting->run()); });
  try {
    while (stores.wait_for(milliseconds(10)) != std::future_status::ready) {
      while_meeting();
      if (meeting->is_late()) throw meeting->no_answer();
    }
  } catch (...) {
    meeting->give_up();
    throw;
  }
  return stores.get();
}

// A rank may have two connections to every other rank, one for gradients and one for control, and rank 0, which keeps
// the store, two more from each.
void allow_connections(const ClusterEnvironment& environment) {
  constexpr int64_t kOtherFiles = 512;
  const int64_t needed = kOtherFiles + (environment.rank == 0 ? 4 : 2) * environment.world_size;
  const int64_t allowed = allow_open_files(needed);
  if (allowed >= needed || environment.local_rank > 0) return;
  log_warning(
      "rank {} may need {} open files, for connections to {} ranks, but a process of this host may have {}; raise the "
      "hard limit, say in /etc/security/limits.conf",
      environment.rank, needed, environment.world_size, allowed);
}

// Gradients are exchanged while others are computed: the threads of the exchange take a quarter of a rank's cores at
// most.
int64_t threads_of_a_group(int64_t local_world_size) {
  return std::clamp<int64_t>(threads_per_rank(local_world_size) / 4, 1, 4);
}

}  // namespace

World connect_world(const ClusterEnvironment& environment, const WorldOptions& options,
                    const std::function<void()>& while_meeting) {
  if (environment.world_size == 1) return World();
  allow_connections(environment);
  const EnvironmentVariables variables = process_environment_variables();
  const Clock::time_point deadline = Clock::now() + to_milliseconds(options.connect_timeout_s);
  wait_for_name(environment, while_meeting, deadline);
  NetworkInterface network = choose_network(variables, environment.master_address, environment.master_port,
                                            environment.local_world_size < environment.world_size);
  WorldOptions chosen = options;
  chosen.collectives.shared_memory = options.collectives.shared_memory && allows_shared_memory(variables);
  chosen.collectives.host_id = host_id(variables);
  chosen.collectives.num_threads = threads_of_a_group(environment.local_world_size);
  const std::optional<int64_t> store_rank = environment.launcher_keeps_store ? std::nullopt : std::optional<int64_t>(0);
  return World(meet(environment, chosen, while_meeting, deadline), environment.rank, environment.world_size, store_rank,
               std::move(network), chosen);
}

World connect_again(World& world, const WorldOptions& options) {
  c10d::TCPStoreOptions store;
  store.isServer = world.rank() == 0;
  store.waitWorkers = false;
  const at::Tensor port = at::zeros({1}, at::kLong);
  Store met;
  if (store.isServer) {
    store.port = 0;
    const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store);
    port.fill_(static_cast<int64_t>(server->getPort()));
    met = server;
  }
  world.control().broadcast(port, /*root=*/0).wait();
  if (!store.isServer) {
    store.port = static_cast<uint16_t>(port.item<int64_t>());
    met = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store);
  }
  return World(WorldStores(met), world.rank(), world.world_size(), /*store_rank=*/0, {.interface = "lo"}, options);
}

}  // namespace fulgur
