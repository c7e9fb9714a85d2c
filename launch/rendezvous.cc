#include "fulgur/launch/rendezvous.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <random>
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
#include "fulgur/distributed/to_milliseconds.h"
#include "fulgur/distributed/world_stores.h"
#include "fulgur/launch/launcher.h"
#include "fulgur/launch/open_files.h"

namespace fulgur {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kNumAsked = "num_asked";  // how many questions for the name of a run were ever asked

// A name that nobody else draws.
std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

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
    const Store store = open_store();
    try {
      return environment_.store_prefix.empty() ? join(store, [] {}) : join_this_run(store);
    } catch (const c10::Error&) {
      throw DistributedError(
          fmt::format("rank {}: rank 0 ended or aborted while the ranks joined at {}", environment_.rank, place_), 0);
    }
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

  // A store that outlives runs still has the keys of earlier runs and of attempts that failed. No count tells them
  // apart: torchrun's agents count restarts each for itself. So rank 0 draws the name of the run, which begins its
  // keys, and tells it every rank that asks. A question of a failed attempt is answered too, but its rank does not
  // join.
  Store join_this_run(const Store& store) const {
    c10d::PrefixStore questions(environment_.store_prefix, store);
    const std::string name = environment_.rank == 0 ? random_name() : ask_for_name(questions);
    const auto of_run =
        c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}{}/", environment_.store_prefix, name), store);
    if (environment_.rank > 0) return join(of_run, [] {});
    std::vector<std::string> answered(static_cast<size_t>(environment_.world_size));
    int64_t num_answered = -1;
    return join(of_run, [&] {
      const int64_t num_asked = questions.add(kNumAsked, 0);
      if (num_asked == num_answered) return;
      answer(questions, name, answered);
      num_answered = num_asked;
    });
  }

  // A question has a name of its own, so that no rank takes the answer to an earlier one.
  std::string ask_for_name(c10d::Store& questions) const {
    const std::string question = random_name(), key = answer_key(environment_.rank, question);
    questions.set(question_key(environment_.rank), question);
    questions.add(kNumAsked, 1);
    if (wait_until([&] { return questions.check({key}); })) return questions.get_to_str(key);
    throw DistributedError(fmt::format("rank {}: of {} ranks, rank 0 has not joined within {:g} s", environment_.rank,
                                       environment_.world_size, seconds(timeout_)),
                           0);
  }

  // Answers the last question of each rank. `answered` has the questions, by rank, that were answered before.
  void answer(c10d::Store& questions, const std::string& name, std::vector<std::string>& answered) const {
    for (int64_t rank = 1; rank < environment_.world_size; ++rank) {
      if (!questions.check({question_key(rank)})) continue;
      const std::string question = questions.get_to_str(question_key(rank));
      if (question == std::exchange(answered[static_cast<size_t>(rank)], question)) continue;
      questions.set(answer_key(rank, question), name);
    }
  }

  // Returns the store after every rank has joined at it. Until then calls `while_waiting` repeatedly. Throws an error
  // that names the ranks that have not joined in time.
  Store join(const Store& store, const std::function<void()>& while_waiting) const {
    const auto key = [](int64_t rank) { return fmt::format("joined/{}", rank); };
    std::vector<std::string> keys;
    for (int64_t rank = 0; rank < environment_.world_size; ++rank) keys.push_back(key(rank));
    store->set(key(environment_.rank), std::string("1"));
    store->add("num_joined", 1);  // to ask for one number is less work for the store than to ask for every key
    const bool has_everyone = wait_until([&] {
      while_waiting();
      return store->add("num_joined", 0) >= environment_.world_size && store->check(keys);
    });
    if (!has_everyone) throw_if_any_misses(*store, keys);
    return store;
  }

  // Returns false if the time is over first.
  bool wait_until(const std::function<bool()>& condition) const {
    for (milliseconds pause{2}; !condition(); pause = std::min(2 * pause, milliseconds(100))) {
      if (is_over()) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  void throw_if_any_misses(c10d::Store& store, const std::vector<std::string>& keys) const {
    std::vector<size_t> missing;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      if (!store.check({keys[rank]})) missing.push_back(rank);
    }
    if (missing.empty()) return;  // the last one has come since
    throw DistributedError(
        fmt::format("rank {}: of {} ranks, {} {} {} not joined within {:g} s", environment_.rank,
                    environment_.world_size, missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "),
                    missing.size() == 1 ? "has" : "have", seconds(timeout_)),
        static_cast<int64_t>(missing.front()));
  }

  static std::string question_key(int64_t rank) { return fmt::format("question/{}", rank); }
  static std::string answer_key(int64_t rank, const std::string& question) {
    return fmt::format("answer/{}/{}", rank, question);
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
