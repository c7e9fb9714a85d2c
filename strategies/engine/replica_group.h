#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/device/stream_worker.h"
#include "fulgur/distributed/collective.h"

namespace fulgur {

// One of several groups of ranks that are replicas of each other, as a Collective. rank(), world_size(), all_gather and
// broadcast are those of the group. Reductions are over all groups: first within each group, then, on a separate
// thread, across groups. While one tensor is reduced across groups, the next one is reduced within. With `rank_order`,
// sums across groups are added in the order of groups over every transport, as in a reduce_scatter.
// Threading: as any Collective; the separate thread makes the reductions across groups.
class ReplicaGroup final : public Collective {
 public:
  // `across` are the ranks that have this rank's place in their groups; `device` is where the tensors are.
  ReplicaGroup(std::shared_ptr<Collective> within, std::shared_ptr<Collective> across, c10::Device device,
               bool rank_order);

  int64_t rank() const override { return within_->rank(); }
  int64_t world_size() const override { return within_->world_size(); }
  Work all_reduce(at::Tensor flat, ReduceOp op = ReduceOp::sum) override;
  Work reduce_scatter(at::Tensor flat, ReduceOp op = ReduceOp::sum, at::Tensor into = {}) override;
  Work all_gather(at::Tensor flat) override { return within_->all_gather(flat); }
  Work broadcast(at::Tensor flat, int64_t root) override { return within_->broadcast(flat, root); }
  void barrier() override;
  at::Tensor allocate(int64_t num_elements, const at::TensorOptions& options) override {
    return within_->allocate(num_elements, options);
  }
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) override {
    return within_->sub_group(ranks);
  }
  void abort(const std::string& reason) noexcept override;

 private:
  Work then_across(Work within, const at::Tensor& part, ReduceOp op);

  const std::shared_ptr<Collective> within_, across_;
  const bool rank_order_;
  StreamWorker worker_;  // declared last, so destroyed first: its jobs use all other members
};

}  // namespace fulgur
