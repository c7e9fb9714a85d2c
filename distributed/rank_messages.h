#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/core/metric.h"
#include "fulgur/core/ranks.h"
#include "fulgur/distributed/collective.h"

namespace fulgur {

// Exchanges between ranks besides gradients and parameters. Every rank of the group makes the same calls in the same
// order; all calls block. Errors: DistributedError, as thrown by the Collective.

// The bytes that each rank passed, by rank. Sizes may differ.
std::vector<std::string> all_gather_bytes(Collective& group, std::string_view bytes);

// The tensors of all ranks as one of shape [world_size, ...], on the device of `tensor`, without a graph. Throws
// c10::ValueError, on every rank, if tensors differ in shape or dtype, or if one is undefined.
at::Tensor all_gather_tensors(Collective& group, const at::Tensor& tensor);

// Overwrites the tensors, of any number, shape and dtype, with their values on rank `root`. Small tensors are packed
// into few calls, with at most `chunk_bytes` (or one tensor's size) of memory. Shapes, dtypes and order must be the
// same on every rank.
void broadcast_tensors(Collective& group, const std::vector<at::Tensor>& tensors, int64_t root,
                       int64_t chunk_bytes = 8 << 20);

// Adapts a group to the interface by which metrics and logged values are reduced (core/ranks.h).
class CollectiveRanks final : public Ranks {
 public:
  explicit CollectiveRanks(Collective& group) : group_(group) {}  // borrowed; must take CPU tensors

  int64_t rank() const override { return group_.rank(); }
  int64_t world_size() const override { return group_.world_size(); }
  void all_reduce(std::span<double> values, Reduction reduction) override;
  MetricStates combine(MetricStates states) override;
  std::vector<std::string> all_gather(std::string_view text) override { return all_gather_bytes(group_, text); }

 private:
  Collective& group_;
};

}  // namespace fulgur
