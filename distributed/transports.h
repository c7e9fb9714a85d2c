#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fulgur/distributed/group.h"
#include "fulgur/distributed/host_transport.h"

namespace fulgur {

// What connects the ranks of a group: a HostTransport if their tensors are in host memory, a backend of c10d if they
// are on devices, or neither, if the transport does not apply to the group.
struct Connection {
  Connection() = default;
  Connection(std::unique_ptr<HostTransport> transport) : host(std::move(transport)) {}
  Connection(c10::intrusive_ptr<c10d::Backend> backend) : device(std::move(backend)) {}

  explicit operator bool() const { return host != nullptr || device.defined(); }

  std::unique_ptr<HostTransport> host{};
  c10::intrusive_ptr<c10d::Backend> device{};
};

// Connects this rank to the others of the group, which make the same call. Returns null, on every rank alike, if the
// transport does not apply: it takes tensors of another device, the options name another transport, or the ranks are on
// several hosts. Blocks until every rank has called it, or until the group's connect_timeout. Throws UsageError for
// settings that cannot be used, another std::exception if the ranks do not connect.
using ConnectTransport = std::function<Connection(const GroupConfig& group)>;

// Every transport, in the order in which they are tried: fulgur's own, and those that were added. To add a transport,
// write a pair of files and either add a line in transports.cc, or call add_transport() in an optional target.
std::vector<ConnectTransport> transports();
void add_transport(ConnectTransport transport);  // call it from the initializer of a static object, before main()

// Connects by the first transport that applies. Throws UsageError if none does.
Connection connect(const GroupConfig& group, const std::vector<ConnectTransport>& transports);

}  // namespace fulgur
