#include "fulgur/strategies/engine/replica_group.h"

#include <chrono>
#include <future>
#include <utility>

namespace fulgur {

ReplicaGroup::ReplicaGroup(std::shared_ptr<Collective> within, std::shared_ptr<Collective> across, c10::Device device,
                           bool rank_order)
    : within_(std::move(within)),
      across_(std::move(across)),
      rank_order_(rank_order),
      worker_(device, {.one_thread = true}) {}

Work ReplicaGroup::all_reduce(at::Tensor flat, ReduceOp op) {
  return then_across(within_->all_reduce(flat, op), flat, op);
}

Work ReplicaGroup::reduce_scatter(at::Tensor flat, ReduceOp op, at::Tensor into) {
  const at::Tensor part = into.defined() ? into : rank_range(flat.numel(), rank(), world_size()).of(flat);
  return then_across(within_->reduce_scatter(flat, op, into), part, op);
}

// Reduces across groups what `within` leaves in `part`. Every rank gives its worker the same jobs in the same order.
Work ReplicaGroup::then_across(Work within, const at::Tensor& part, ReduceOp op) {
  const auto of_group = std::make_shared<Work>(std::move(within));
  const std::shared_future<void> done = worker_.run([this, of_group, part, op] {
    of_group->wait();
    (rank_order_ ? all_reduce_in_rank_order(*across_, part, op) : across_->all_reduce(part, op)).wait();
  });
  return Work([done] { done.get(); },
              [done] { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
}

void ReplicaGroup::barrier() {
  within_->barrier();
  across_->barrier();
}

void ReplicaGroup::abort(const std::string& reason) noexcept {
  within_->abort(reason);
  across_->abort(reason);
}

}  // namespace fulgur
