#include "tests/testing/ranks.h"

#include <ATen/Parallel.h>

#include <barrier>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "fulgur/distributed/world_stores.h"
#include "fulgur/launch/thread_world.h"

namespace fulgur::testing {

WorldOptions connected(bool shared_memory) {
  WorldOptions options{.timeout_s = kRanksTimeoutS, .heartbeat_interval_s = 0.1};
  options.collectives.shared_memory = shared_memory;
  return options;
}

void run_ranks(int64_t world_size, const std::function<void(World&)>& body) {
  run_ranks(world_size, {.timeout_s = kRanksTimeoutS, .heartbeat_interval_s = 0.1}, body);
}

void run_ranks(int64_t world_size, WorldOptions options, const std::function<void(World&)>& body) {
  run_ranks_on_hosts(1, world_size, std::move(options), body);
}

void run_ranks_on_hosts(int64_t num_hosts, int64_t ranks_per_host, WorldOptions options,
                        const std::function<void(World&)>& body) {
  const int64_t world_size = num_hosts * ranks_per_host;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr first;
  std::barrier all_done(world_size);  // destroying a World breaks the connections of the others
  const auto run_rank = [&](int64_t rank) {
    at::set_num_threads(1);
    WorldOptions of_rank = options;
    if (num_hosts > 1) of_rank.collectives.host_id = std::to_string(rank / ranks_per_host);
    const auto note = [&](World& world, std::exception_ptr error, const char* what) {
      {
        const std::lock_guard lock(mutex);
        if (!first) first = error;
      }
      world.abort(what);
    };
    World world = world_size == 1 ? World()
                                  : World(WorldStores(store), rank, world_size, std::nullopt,
                                          {.interface = "lo", .address = {}}, of_rank);
    try {
      const ScopedThreadWorld as_process(world);
      body(world);
      world.leave();
    } catch (const std::exception& error) {
      note(world, std::current_exception(), error.what());
    }
    all_done.arrive_and_wait();
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world_size; ++rank) threads.emplace_back(run_rank, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace fulgur::testing
