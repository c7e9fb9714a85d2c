#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "distributed/collective.h"
#include "distributed/group.h"
#include "distributed/heartbeat.h"

namespace fulgur {

struct C10dOptions {
  bool shared_memory = true;               // between CPUs of one host, where that is possible; else Gloo
  bool rank_order_all_reduce = false;      // all_reduce adds in the order of ranks over Gloo too: the same bits as
                                           // reduce_scatter, at any world size, wherever the tensor begins
  std::optional<int64_t> staging_bytes{};  // on the CPU: memory of a large collective for what is on its way; by
                                           // default 1 MiB of shared memory per rank, or 8 MiB with Gloo
};

// Collectives between processes. On the CPU they are Transfers: through memory that ranks of one host share, or Gloo.
// Large ones run on a thread of the group's; small all_reduces are summed by wait(). On CUDA they are NCCL's.
// Destroy it on every rank after a barrier, or after abort(): a rank that goes breaks the connections of the others.
class C10dCollective final : public Collective {
 public:
  // Connects; blocks until every rank of the group does the same. `heartbeat` is this rank's, shared by all groups.
  // Throws DistributedError if a rank does not come within the group's connect_timeout.
  C10dCollective(Group group, Connect connect, std::shared_ptr<Heartbeat> heartbeat, C10dOptions options = {});
  ~C10dCollective() override;

  int64_t rank() const override;
  int64_t world_size() const override;
  Work all_reduce(at::Tensor flat, ReduceOp op = ReduceOp::sum) override;
  Work reduce_scatter(at::Tensor flat, ReduceOp op = ReduceOp::sum, at::Tensor into = {}) override;
  Work all_gather(at::Tensor flat) override;
  Work broadcast(at::Tensor flat, int64_t root) override;
  void barrier() override;
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) override;

  // Ends what runs and what is called later, here and on the other ranks, with a DistributedError; also in the groups
  // that sub_group() has made. From any thread.
  void abort(std::string_view reason);

  // The same where the Heartbeat knows the reason: the error is what it finds.
  void interrupt();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fulgur
