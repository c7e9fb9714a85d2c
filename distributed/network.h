#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distributed/environment_variables.h"

namespace fulgur {

// Where this process takes connections from other ranks: an interface, or else an address of this host (IPv4 or IPv6).
struct Network {
  std::string interface{};
  std::string address{};
};

// FULGUR_SOCKET_IFNAME, or else GLOO_SOCKET_IFNAME, names the interface. Without them it is the address from which this
// host reaches the master (127.0.0.1 or ::1 where that is this host), so a host with several networks takes the right
// one. With several hosts, where the master's name stands for the loopback on its own host, it is that of an interface
// which is up. Throws UsageError for an interface that does not exist, listing those that do, and DistributedError if
// there is no way to the master.
Network choose_network(const EnvironmentVariables& variables, const std::string& master_address, uint16_t master_port,
                       bool several_hosts);

// The name is unknown now, but a name server may learn it.
bool may_be_known_later(const std::string& host);

// Unless FULGUR_SHARED_MEMORY is 0: then ranks of one host exchange over the network, too. Throws UsageError for a
// value other than 0 and 1.
bool allows_shared_memory(const EnvironmentVariables& variables);

std::vector<std::string> interface_names();

// Whether something takes connections at this place; why not, if nothing does. Waits for an answer, at most a second.
std::optional<std::string> why_nobody_listens(const std::string& host, uint16_t port);

// A socket that listens at a free port of this host's loopback (127.0.0.1, or ::1 on a host without IPv4). The port is
// taken from the moment it is known.
class LoopbackListener {
 public:
  LoopbackListener();
  ~LoopbackListener();
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;

  const std::string& address() const { return address_; }
  uint16_t port() const { return port_; }
  int release();  // the file descriptor, which is now the caller's to close

 private:
  bool listen_at(int family);

  std::string address_;
  uint16_t port_ = 0;
  int descriptor_ = -1;
};

}  // namespace fulgur
