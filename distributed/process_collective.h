#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/distributed/group.h"
#include "fulgur/distributed/heartbeat.h"
#include "fulgur/distributed/transports.h"

namespace fulgur {

// Collectives between processes. On the CPU they use a HostTransport: through memory shared by the ranks of one host,
// or Gloo. Large ones run on a thread of the group; small all_reduces are summed by wait(). On CUDA they are NCCL's.
// Destroy the object on every rank after a barrier, or after abort(): a rank that disconnects breaks the connections of
// the others.
class ProcessCollective final : public Collective {
 public:
  // Connects by the first of the transports that applies; blocks until every rank of the group does the same. All
  // groups of this rank share `heartbeat`. Throws DistributedError if a rank does not join within the group's
  // connect_timeout, or if `whole_aborts` is requested to stop meanwhile, because the group of which this one is a
  // part is aborted; UsageError if no transport applies.
  ProcessCollective(GroupConfig group, std::shared_ptr<Heartbeat> heartbeat,
                    std::vector<ConnectTransport> transports = fulgur::transports(),
                    const std::stop_token& whole_aborts = {});
  ~ProcessCollective() override;

  int64_t rank() const override;
  int64_t world_size() const override;
  Work all_reduce(at::Tensor flat, ReduceOp op = ReduceOp::sum) override;
  bool adds_in_rank_order() const override;
  Work reduce_scatter(at::Tensor flat, ReduceOp op = ReduceOp::sum, at::Tensor into = {}) override;
  Work all_gather(at::Tensor flat) override;
  Work broadcast(at::Tensor flat, int64_t root) override;
  void barrier() override;
  at::Tensor allocate(int64_t num_elements, const at::TensorOptions& options) override;
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) override;
  void abort(const std::string& reason) noexcept override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fulgur
