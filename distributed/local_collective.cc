#include "fulgur/distributed/local_collective.h"

namespace fulgur {

Work LocalCollective::all_reduce(at::Tensor flat, ReduceOp) {
  check_flat(flat);
  return Work();
}

Work LocalCollective::reduce_scatter(at::Tensor flat, ReduceOp, at::Tensor into) {
  check_flat(flat);
  if (into.defined()) {
    check_into(into, flat);
    into.copy_(flat);
  }
  return Work();
}

Work LocalCollective::all_gather(at::Tensor flat) {
  check_flat(flat);
  return Work();
}

Work LocalCollective::broadcast(at::Tensor flat, int64_t root) {
  check_flat(flat);
  check_root(root, 1);
  return Work();
}

std::shared_ptr<Collective> LocalCollective::sub_group(const std::vector<int64_t>& ranks) {
  check_ranks(ranks, 1);
  return std::make_shared<LocalCollective>();
}

}  // namespace fulgur
