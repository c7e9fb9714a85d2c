#include "fulgur/distributed/collective.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

namespace fulgur {

ElementRange rank_range(int64_t num_elements, int64_t rank, int64_t world_size) {
  const int64_t size = (num_elements + world_size - 1) / world_size;
  return {std::min(rank * size, num_elements), std::min((rank + 1) * size, num_elements)};
}

at::Tensor Collective::allocate(int64_t num_elements, const at::TensorOptions& options) {
  return at::zeros({num_elements}, options);
}

std::shared_ptr<Collective> Collective::duplicate() {
  std::vector<int64_t> all_ranks(static_cast<size_t>(world_size()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  return sub_group(all_ranks);
}

Work all_reduce_in_rank_order(Collective& group, const at::Tensor& flat, ReduceOp op) {
  if (group.adds_in_rank_order()) return group.all_reduce(flat, op);
  static_cast<void>(group.reduce_scatter(flat, op));
  return group.all_gather(flat);
}

void check_flat(const at::Tensor& flat) {
  TORCH_CHECK_VALUE(flat.defined(), "a collective was given an undefined tensor");
  TORCH_CHECK_VALUE(flat.dim() == 1 && flat.is_contiguous(),
                    "a collective takes a contiguous tensor of 1 dimension; got ", flat.sizes(), " with strides ",
                    flat.strides(), "; pass tensor.view({-1})");
  switch (flat.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kInt:
    case at::kLong:
    case at::kByte:
    case at::kBool:
      return;
    default:
      TORCH_CHECK_VALUE(false, "a collective does not take ", flat.scalar_type(),
                        "; it takes float, double, bfloat16, half, int, long, uint8 and bool");
  }
}

void check_into(const at::Tensor& into, const at::Tensor& range) {
  check_flat(into);
  TORCH_CHECK_VALUE(
      into.numel() == range.numel() && into.scalar_type() == range.scalar_type() && into.device() == range.device(),
      "reduce_scatter into ", into.numel(), " elements of ", into.scalar_type(), " on ", into.device(),
      ", but this rank's range has ", range.numel(), " of ", range.scalar_type(), " on ", range.device());
}

void check_root(int64_t root, int64_t world_size) {
  TORCH_CHECK_VALUE(0 <= root && root < world_size, "broadcast from rank ", root, ", but ranks go from 0 to ",
                    world_size - 1);
}

void check_ranks(const std::vector<int64_t>& ranks, int64_t world_size) {
  TORCH_CHECK_VALUE(!ranks.empty(), "a sub-group needs at least one rank");
  std::unordered_set<int64_t> seen;
  for (const int64_t rank : ranks) {
    TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "a sub-group with rank ", rank, ", but ranks go from 0 to ",
                      world_size - 1);
    TORCH_CHECK_VALUE(seen.insert(rank).second, "a sub-group with rank ", rank, " twice");
  }
}

}  // namespace fulgur
