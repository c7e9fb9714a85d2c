#include "fulgur/trainer/run_world.h"

#include <ATen/Context.h>

#include "fulgur/base/seed.h"
#include "fulgur/launch/thread_world.h"
#include "fulgur/trainer/choose_strategy.h"

namespace fulgur {
namespace {

// Gives each rank a seed of its own, so that dropout differs from rank to rank. Rank 0 draws what one process would.
void seed_rank(int64_t rank) {
  if (rank == 0) return;
  const uint64_t seed = at::globalContext().defaultGenerator(c10::kCPU).current_seed();
  seed_everything(seed + static_cast<uint64_t>(rank) * 0x9e3779b97f4a7c15);
}

}  // namespace

RunWorld::RunWorld(const Strategy& strategy, const std::vector<c10::Device>& devices, int64_t num_nodes)
    : devices_(devices) {
  const std::optional<WorldOptions> ranks = strategy.rank_per_device();
  World* const threads = ranks ? ScopedThreadWorld::current() : nullptr;
  const bool has_one_rank = static_cast<int64_t>(devices.size()) * num_nodes == 1;
  if (!ranks || (has_one_rank && threads == nullptr)) {
    check_alone();
    world_ = &local_world_.emplace();
    return;
  }
  if (threads != nullptr) {
    world_ = threads;
    local_rank_ = threads->rank();
  } else {
    session_ = &process_session::join({.devices = devices, .num_nodes = num_nodes, .world = *ranks});
    session_->set_busy(true);
    world_ = &session_->world();
    local_rank_ = session_->environment().local_rank;
    seed_rank(world_->rank());
  }
  rank_ = world_->rank();
  world_size_ = world_->world_size();
  devices_ = {devices[static_cast<size_t>(local_rank_) % devices.size()]};
}

void RunWorld::abort(const std::string& reason) {
  if (session_ != nullptr) return session_->abort(reason);
  world_->abort(reason);
}

void RunWorld::leave(std::exception_ptr failure) {
  if (session_ != nullptr) session_->set_busy(false);
  if (failure == nullptr) return;
  std::rethrow_exception(session_ != nullptr ? process_session::end(failure) : failure);
}

}  // namespace fulgur
