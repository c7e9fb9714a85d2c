#include "distributed/network.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace fulgur {
namespace {

std::string numeric_address(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  if (::getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text;
}

// The address that packets to `target` leave from; empty if there is no way. Sends nothing.
std::string address_towards(const addrinfo& target) {
  const int descriptor = ::socket(target.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return {};
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  std::string address;
  if (::connect(descriptor, target.ai_addr, target.ai_addrlen) == 0 &&
      ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size) == 0) {
    address = numeric_address(reinterpret_cast<const sockaddr*>(&own), size);
  }
  ::close(descriptor);
  return address;
}

std::string address_towards(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  std::string address;
  for (const addrinfo* target = found; code == 0 && target != nullptr && address.empty(); target = target->ai_next) {
    address = address_towards(*target);
  }
  if (!address.empty()) return address;
  throw DistributedError(fmt::format("there is no way from here to the master '{}' ({}): check MASTER_ADDR", host,
                                     code == 0 ? std::strerror(errno) : ::gai_strerror(code)),
                         0);
}

Network on_interface(const std::string& variable, std::string name) {
  name = name.substr(0, name.find(','));  // Gloo takes a list; one is enough
  const std::vector<std::string> known = interface_names();
  if (std::ranges::find(known, name) != known.end()) return {.interface = name};
  throw UsageError(fmt::format("{}={}: this host has no such network interface; it has: {}", variable, name,
                               fmt::join(known, ", ")));
}

}  // namespace

std::vector<std::string> interface_names() {
  const std::unique_ptr<struct if_nameindex, decltype(&::if_freenameindex)> list(::if_nameindex(), ::if_freenameindex);
  std::vector<std::string> names;
  for (const struct if_nameindex* entry = list.get(); entry != nullptr && entry->if_index != 0; ++entry) {
    names.emplace_back(entry->if_name);
  }
  return names;
}

Network choose_network(const EnvironmentVariables& variables, const std::string& master_address, uint16_t master_port) {
  for (const char* variable : {"FULGUR_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    if (const auto name = find_variable(variables, variable)) return on_interface(variable, *name);
  }
  return {.address = address_towards(master_address, master_port)};
}

LoopbackListener::LoopbackListener() {
  if (listen_at(AF_INET) || listen_at(AF_INET6)) return;
  throw DistributedError(fmt::format("cannot listen on this host's loopback interface: {}", std::strerror(errno)));
}

LoopbackListener::~LoopbackListener() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int LoopbackListener::release() { return std::exchange(descriptor_, -1); }

bool LoopbackListener::listen_at(int family) {
  sockaddr_storage storage{};
  socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  storage.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  } else {
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_addr = in6addr_loopback;
  }
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  const int descriptor = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return false;
  if (::bind(descriptor, address, size) != 0 || ::listen(descriptor, SOMAXCONN) != 0 ||
      ::getsockname(descriptor, address, &size) != 0) {
    ::close(descriptor);
    return false;
  }
  address_ = numeric_address(address, size);
  port_ = ntohs(family == AF_INET ? reinterpret_cast<sockaddr_in*>(&storage)->sin_port
                                  : reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port);
  descriptor_ = descriptor;
  return true;
}

}  // namespace fulgur
