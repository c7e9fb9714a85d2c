#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/job_queue.h"
#include "fulgur/distributed/collective.h"
#include "fulgur/distributed/group.h"
#include "fulgur/distributed/host_transport.h"
#include "fulgur/distributed/small_queue.h"

namespace fulgur {

// Connects the ranks of a group by shared memory within a host and, across hosts, as `connect_across` connects the
// ranks in one place of each host. Returns null, on every rank, unless all of this holds: the tensors are on the CPU,
// there are several hosts with the same number of ranks, at least 2, the ranks of a host are consecutive, and all ranks
// may share memory. For the group "data" rank 0 logs a warning if only the numbers and the order of ranks stand in the
// way. Every rank of the group calls it. Throws what the store or connect_across throws.
std::unique_ptr<HostTransport> connect_two_levels(
    const GroupConfig& group, const std::function<std::unique_ptr<HostTransport>(const GroupConfig&)>& connect_across);

// connect_two_levels() with Gloo across hosts. Returns null also if the options name another transport.
std::unique_ptr<HostTransport> connect_hierarchy(const GroupConfig& group);

// The number of ranks on each host, given the host of each rank; nullopt if connect_two_levels() does not support
// this placement.
std::optional<int64_t> ranks_per_host(const std::vector<std::string>& hosts);

// Moves tensors in two levels: between the ranks of a host, and between the ranks that have the same place on their
// hosts. Of M bytes that are reduced, or gathered, a host with any number of ranks sends M (H - 1) / H to the H - 1
// others, which is the minimum. Reductions add in the order of ranks within a host, then in the order of hosts. Large
// tensors go in chunks: while one chunk is exchanged between hosts, the next one is summed on each host.
class HierarchicalTransport final : public HostTransport {
 public:
  // `on_host` connects the ranks of this host, `across` those with this place on each host. Rank r of the group is rank
  // r % ranks_per_host on host r / ranks_per_host.
  HierarchicalTransport(std::unique_ptr<HostTransport> on_host, std::unique_ptr<HostTransport> across, int64_t rank,
                        int64_t ranks_per_host, int64_t num_hosts, int64_t chunk_bytes);

  void all_reduce(const at::Tensor& flat, ReduceOp op) override;
  bool all_reduces_in_rank_order() const override { return true; }
  void reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into, const RankRanges& ranges) override;
  void all_gather(const at::Tensor& flat, const RankRanges& ranges) override;
  void broadcast(const at::Tensor& flat, int64_t root) override;
  void barrier() override;
  std::shared_ptr<SmallAllReduce> small_all_reduce(const at::Tensor& flat, ReduceOp op) override;
  void abort() override;
  void end() override;
  at::Tensor allocate(int64_t num_elements, c10::ScalarType dtype) override {
    return on_host_->allocate(num_elements, dtype);
  }

 private:
  using Step = std::function<void(const RankRanges& chunk)>;

  void in_chunks(const at::Tensor& flat, const RankRanges& ranges, const Step& before, const Step& between_hosts,
                 const Step& after);
  RankRanges of_host(int64_t host, const RankRanges& chunk) const;
  RankRanges across_hosts(const RankRanges& chunk) const;
  void add_up_on_host(const at::Tensor& flat, ReduceOp op, const RankRanges& chunk);
  void gather_on_host(const at::Tensor& flat, const RankRanges& chunk);
  template <class Body>
  void run(const Body& body);

  const std::unique_ptr<HostTransport> on_host_, across_;
  const int64_t place_, host_;
  const int64_t ranks_per_host_, num_hosts_;
  const int64_t chunk_bytes_;
  SmallQueue small_;
  JobQueue between_hosts_;  // declared last, so destroyed first: it uses all other members
};

}  // namespace fulgur
