#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/environment_variables.h"

namespace fulgur {

// Where this process accepts connections from other ranks: an interface, or, if empty, an address of this host (IPv4 or
// IPv6).
struct NetworkInterface {
  std::string interface{};
  std::string address{};
};

// FULGUR_SOCKET_IFNAME, or otherwise GLOO_SOCKET_IFNAME, names the interface. Without them the result is the address
// from which this host reaches the master (127.0.0.1 or ::1 if the master is this host), so that a host with several
// networks uses the right one. With several hosts, if the master's name means the loopback on the master's own host,
// the address of an interface that is up is used there. Throws UsageError for an interface that does not exist, listing
// the existing ones, and DistributedError if the master cannot be reached.
NetworkInterface choose_network(const EnvironmentVariables& variables, const std::string& master_address,
                                uint16_t master_port, bool several_hosts);

// True if the name is unknown now, but a name server may learn it.
bool may_be_known_later(const std::string& host);

// False if FULGUR_SHARED_MEMORY is 0: ranks of one host then exchange over the network, too. Throws UsageError for a
// value other than 0 and 1.
bool allows_shared_memory(const EnvironmentVariables& variables);
std::string host_id(const EnvironmentVariables& variables);  // FULGUR_HOST_ID, or empty

std::vector<std::string> interface_names();

// Returns nullopt if a program accepts connections at this address, otherwise the reason. Waits at most a second for
// each address that the host name has.
std::optional<std::string> why_nobody_listens(const std::string& host, uint16_t port);

// A socket that listens at a free port of this host's loopback (127.0.0.1, or ::1 on a host without IPv4). Since it
// listens already, no other program can take the port.
class LoopbackListener {
 public:
  LoopbackListener();
  ~LoopbackListener();
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;

  const std::string& address() const { return address_; }
  uint16_t port() const { return port_; }
  int release();  // returns the file descriptor, which the caller must close

 private:
  bool listen_at(int family);

  std::string address_;
  uint16_t port_ = 0;
  int descriptor_ = -1;
};

}  // namespace fulgur
