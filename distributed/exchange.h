#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/metric.h"
#include "core/ranks.h"
#include "distributed/collective.h"

namespace fulgur {

// What ranks tell each other besides gradients and parameters. Every rank of the group makes the same calls in the same
// order; all block. Errors: DistributedError, as those of the Collective.

// The bytes of every rank, by rank. Sizes may differ.
std::vector<std::string> all_gather_bytes(Collective& group, std::string_view bytes);

// The tensors of every rank: of shape [world_size, ...], on the device of `tensor`, without a graph. Throws
// c10::ValueError, on every rank, if they differ in shape or dtype, or if one is undefined.
at::Tensor all_gather_tensors(Collective& group, const at::Tensor& tensor);

// Tensors of any number, shape and dtype take the values that they have on rank `root`. They are packed, so that many
// small ones are one call, in at most `chunk_bytes` (or one tensor's) of memory. On every rank of the same shapes and
// dtypes, in the same order.
void broadcast_tensors(Collective& group, const std::vector<at::Tensor>& tensors, int64_t root,
                       int64_t chunk_bytes = 8 << 20);

// The ranks of a group, for values that become one (core/ranks.h).
class GroupRanks final : public Ranks {
 public:
  explicit GroupRanks(Collective& group) : group_(group) {}  // borrowed; its tensors are on the CPU

  int64_t rank() const override { return group_.rank(); }
  int64_t world_size() const override { return group_.world_size(); }
  void all_reduce(std::span<double> values, Reduction reduction) override;
  MetricStates combine(MetricStates states) override;
  std::vector<std::string> all_gather(std::string_view text) override { return all_gather_bytes(group_, text); }

 private:
  Collective& group_;
};

}  // namespace fulgur
