#include "fulgur/distributed/transports.h"

#include <fmt/format.h>

#include <string>

#include "fulgur/base/error.h"
#include "fulgur/distributed/gloo_transport.h"
#include "fulgur/distributed/hierarchical_transport.h"
#include "fulgur/distributed/nccl_transport.h"
#include "fulgur/distributed/shared_memory_transport.h"

namespace fulgur {

namespace {

std::vector<ConnectTransport>& added() {
  static std::vector<ConnectTransport> transports;
  return transports;
}

std::string why_none(const GroupConfig& group) {
  if (group.device.is_cpu() && group.transport.kind == TransportKind::mpi) {
    return "strategy.transport = 'mpi', but this program was built without it; add @fulgur//distributed:mpi_transport "
           "to its deps, or write auto";
  }
  return fmt::format("ranks cannot exchange tensors on {}: no transport takes them; use the CPU or CUDA",
                     c10::DeviceTypeName(group.device.type(), /*lower_case=*/true));
}

}  // namespace

std::vector<ConnectTransport> transports() {
  std::vector<ConnectTransport> all{connect_shared_memory, connect_hierarchy, connect_gloo, connect_nccl};
  all.insert(all.end(), added().begin(), added().end());
  return all;
}

void add_transport(ConnectTransport transport) { added().push_back(std::move(transport)); }

Connection connect(const GroupConfig& group, const std::vector<ConnectTransport>& transports) {
  for (const ConnectTransport& connect_transport : transports) {
    if (Connection connection = connect_transport(group)) return connection;
  }
  throw UsageError(why_none(group));
}

}  // namespace fulgur
