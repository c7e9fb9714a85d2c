#include "fulgur/distributed/transports.h"

#include <fmt/format.h>

#include "fulgur/base/error.h"
#include "fulgur/distributed/gloo_transport.h"
#include "fulgur/distributed/hierarchical_transport.h"
#include "fulgur/distributed/nccl_transport.h"
#include "fulgur/distributed/shared_memory_transport.h"

namespace fulgur {

std::vector<ConnectTransport> transports() {
  return {connect_shared_memory, connect_hierarchy, connect_gloo, connect_nccl};
}

Connection connect(const GroupConfig& group, const std::vector<ConnectTransport>& transports) {
  for (const ConnectTransport& connect_transport : transports) {
    if (Connection connection = connect_transport(group)) return connection;
  }
  throw UsageError(fmt::format("ranks cannot exchange tensors on {}: no transport takes them; use the CPU or CUDA",
                               c10::DeviceTypeName(group.device.type(), /*lower_case=*/true)));
}

}  // namespace fulgur
