#include "fulgur/distributed/world.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/distributed/group.h"
#include "fulgur/distributed/heartbeat.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/distributed/process_collective.h"
#include "fulgur/distributed/to_milliseconds.h"
#include "fulgur/distributed/world_stores.h"

namespace fulgur {
namespace {

// Writing to a peer that has gone must be an error, not a signal that ends the process.
void ignore_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

// Sets, unless the user has set it, what c10d reads from the environment:
// - Its recorder of past collectives, shared by all groups of a process, adds a group that is new to it without taking
//   its lock: threads that each begin with their own group (which has a thread on the CPU) break its map (an error
//   of torch 2.11, in FlightRecorder::recordWithResetEnabled). fulgur reads none of the records.
// - NCCL's watchdog cleans up after an error and leaves the report to the process (2); it neither writes dumps nor ends
//   a process whose watchdog seems to hang.
bool set_environment_of_c10d() {
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  ::setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  return true;
}

// Before main(), because setenv() moves the array that getenv() of another thread may be reading, and oneDNN calls
// getenv() when ATen first sets the number of threads: ranks that are threads would crash.
[[maybe_unused]] const bool environment_is_set = set_environment_of_c10d();

}  // namespace

struct World::Parts {
  std::vector<int64_t> ranks{};
  std::shared_ptr<Heartbeat> heartbeat{};
  std::shared_ptr<Collective> data{};
  std::shared_ptr<Collective> control{};
  std::map<int64_t, Groups> groups_by_size{};  // by the number of ranks in a group

  // Aborts this rank's collectives when another rank fails, even if no call of this rank fails by itself.
  void watch() const {
    const std::vector<std::weak_ptr<Collective>> groups{data, control};
    heartbeat->watch(static_cast<int64_t>(ranks.size()), [groups] {
      for (const auto& group : groups) {
        if (const auto there = group.lock()) there->abort(/*reason=*/"");
      }
    });
  }

  void abort(const std::string& reason) const {
    if (heartbeat) heartbeat->report_failure(reason);
    for (const auto& group : {data, control}) group->abort(reason);
  }
};

World::World() : World(std::make_shared<LocalCollective>(), std::make_shared<LocalCollective>()) {}

World::World(std::shared_ptr<Collective> data, std::shared_ptr<Collective> control)
    : parts_(std::make_unique<Parts>()) {
  parts_->data = std::move(data);
  parts_->control = std::move(control);
}

World::World(const WorldStores& stores, int64_t rank, int64_t world_size, std::optional<int64_t> store_rank,
             NetworkInterface network, const WorldOptions& options)
    : parts_(std::make_unique<Parts>()) {
  ignore_broken_pipes();
  parts_->heartbeat =
      std::make_shared<Heartbeat>(stores.for_heartbeat, rank, store_rank, to_milliseconds(options.heartbeat_interval_s),
                                  to_milliseconds(options.heartbeat_timeout_s));
  parts_->ranks.resize(static_cast<size_t>(world_size));
  std::iota(parts_->ranks.begin(), parts_->ranks.end(), 0);
  GroupConfig group{.name = "data",
                    .store = stores.for_groups,
                    .ranks = parts_->ranks,
                    .rank = rank,
                    .timeout = to_milliseconds(options.timeout_s),
                    .connect_timeout = to_milliseconds(options.connect_timeout_s),
                    .device = options.device,
                    .network = std::move(network),
                    .transport = options.collectives};
  parts_->data = std::make_shared<ProcessCollective>(group, parts_->heartbeat);
  group.name = "control";
  group.device = c10::kCPU;
  parts_->control = std::make_shared<ProcessCollective>(std::move(group), parts_->heartbeat);
  if (world_size > 1) parts_->watch();
}

World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

int64_t World::rank() const { return parts_->control->rank(); }
int64_t World::world_size() const { return parts_->control->world_size(); }
Collective& World::data() { return *parts_->data; }
Collective& World::control() { return *parts_->control; }

// Every rank goes through the groups in the same order, and joins two of them.
const World::Groups& World::groups_of(int64_t group_size) {
  TORCH_CHECK_VALUE(group_size > 0 && world_size() % group_size == 0, "groups of ", group_size, " of ", world_size(),
                    " ranks; pass a number that divides the ranks");
  const auto known = parts_->groups_by_size.find(group_size);
  if (known != parts_->groups_by_size.end()) return known->second;
  const auto join = [this](std::shared_ptr<Collective>& mine, int64_t first, int64_t stride, int64_t count) {
    std::vector<int64_t> ranks;
    for (int64_t i = 0; i < count; ++i) ranks.push_back(first + i * stride);
    if (auto group = parts_->data->sub_group(ranks)) mine = std::move(group);
  };
  const int64_t num_groups = world_size() / group_size;
  Groups groups;
  for (int64_t i = 0; i < num_groups; ++i) join(groups.within, i * group_size, 1, group_size);
  for (int64_t i = 0; i < group_size; ++i) join(groups.across, i, group_size, num_groups);
  return parts_->groups_by_size.emplace(group_size, std::move(groups)).first->second;
}

void World::set_step(int64_t global_step) {
  if (parts_->heartbeat) parts_->heartbeat->set_step(global_step);
}

std::vector<std::string> World::places() const {
  return parts_->heartbeat ? parts_->heartbeat->places() : std::vector<std::string>();
}

void World::abort(const std::string& reason) { parts_->abort(reason); }

void World::leave() {
  if (parts_->heartbeat) parts_->heartbeat->set_at_end();
  parts_->control->barrier();
  if (!parts_->heartbeat) return;
  parts_->heartbeat->stop_watching();
  parts_->heartbeat->leave(parts_->ranks);
}

void World::wait_for_others() {
  if (parts_->heartbeat) parts_->heartbeat->wait_for_others(parts_->ranks);
}

}  // namespace fulgur
