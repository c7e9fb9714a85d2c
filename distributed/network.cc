#include "fulgur/distributed/network.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

std::string numeric_address(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  if (::getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text;
}

// The local address from which packets to `target` leave; empty if there is no route. Sends nothing.
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

// The addresses of a host name; freed by the destructor.
class Addresses {
 public:
  Addresses(const std::string& host, uint16_t port, int type, int flags = 0) {
    addrinfo hints{};
    hints.ai_socktype = type;
    hints.ai_flags = flags;
    code_ = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first_);
  }
  ~Addresses() {
    if (first_ != nullptr) ::freeaddrinfo(first_);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  const addrinfo* first() const { return code_ == 0 ? first_ : nullptr; }
  bool may_come() const { return code_ == EAI_AGAIN || code_ == EAI_NONAME; }
  std::string error() const { return code_ == 0 ? std::strerror(errno) : ::gai_strerror(code_); }

 private:
  addrinfo* first_ = nullptr;
  int code_ = 0;
};

std::string address_towards(const std::string& host, uint16_t port) {
  const Addresses addresses(host, port, SOCK_DGRAM);
  std::string address;
  for (const addrinfo* target = addresses.first(); target != nullptr && address.empty(); target = target->ai_next) {
    address = address_towards(*target);
  }
  if (!address.empty()) return address;
  throw DistributedError(
      fmt::format("there is no way from here to the master '{}' ({}): check MASTER_ADDR", host, addresses.error()), 0);
}

bool is_numeric(const std::string& host) { return Addresses(host, 0, SOCK_DGRAM, AI_NUMERICHOST).first() != nullptr; }

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

// Whether other hosts can reach the address: its interface is up and no loopback, the address not link-local.
bool is_for_others(const ifaddrs& entry) {
  constexpr unsigned int kUp = IFF_UP | IFF_RUNNING;
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & kUp) != kUp || (entry.ifa_flags & IFF_LOOPBACK) != 0)
    return false;
  if (entry.ifa_addr->sa_family == AF_INET) return true;
  return entry.ifa_addr->sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr);
}

// An address of this family, or otherwise of the other family; empty if this host has only the loopback.
std::string address_for_others(int family) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(list, ::freeifaddrs);
  std::string otherwise;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (!is_for_others(*entry)) continue;
    const bool has_family = entry->ifa_addr->sa_family == family;
    if (!has_family && !otherwise.empty()) continue;
    const std::string address = numeric_address(
        entry->ifa_addr, entry->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (has_family) return address;
    otherwise = address;
  }
  return otherwise;
}

// Returns 0 or an errno.
int try_to_connect(const addrinfo& target) {
  const int descriptor = ::socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return errno;
  int error = ::connect(descriptor, target.ai_addr, target.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd polled{.fd = descriptor, .events = POLLOUT, .revents = 0};
    socklen_t size = sizeof error;
    error = ETIMEDOUT;
    if (::poll(&polled, 1, /*timeout, ms*/ 1000) > 0) ::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  ::close(descriptor);
  return error;
}

NetworkInterface on_interface(const std::string& variable, std::string name) {
  name = name.substr(0, name.find(','));  // Gloo takes a list; one is enough
  const std::vector<std::string> known = interface_names();
  if (std::ranges::find(known, name) != known.end()) return {.interface = name};
  throw UsageError(fmt::format("{}={}: this host has no such network interface; it has: {}", variable, name,
                               fmt::join(known, ", ")));
}

}  // namespace

bool allows_shared_memory(const EnvironmentVariables& variables) {
  const std::string value = find_variable(variables, "FULGUR_SHARED_MEMORY").value_or("1");
  if (value != "0" && value != "1")
    throw UsageError(fmt::format("FULGUR_SHARED_MEMORY is '{}'; set it to 0 or 1, or leave it unset", value));
  return value == "1";
}

std::string host_id(const EnvironmentVariables& variables) {
  return find_variable(variables, "FULGUR_HOST_ID").value_or("");
}

std::vector<std::string> interface_names() {
  const std::unique_ptr<struct if_nameindex, decltype(&::if_freenameindex)> list(::if_nameindex(), ::if_freenameindex);
  std::vector<std::string> names;
  for (const struct if_nameindex* entry = list.get(); entry != nullptr && entry->if_index != 0; ++entry) {
    names.emplace_back(entry->if_name);
  }
  return names;
}

// A host's own name is often an address of the loopback there (127.0.1.1 in Debian's /etc/hosts). A numeric loopback
// address is taken literally: several launchers run on one host.
NetworkInterface choose_network(const EnvironmentVariables& variables, const std::string& master_address,
                                uint16_t master_port, bool several_hosts) {
  for (const char* variable : {"FULGUR_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    if (const auto name = find_variable(variables, variable)) return on_interface(variable, *name);
  }
  const std::string address = address_towards(master_address, master_port);
  if (several_hosts && is_loopback(address) && !is_numeric(master_address)) {
    const std::string other = address_for_others(address == "::1" ? AF_INET6 : AF_INET);
    if (!other.empty()) return {.address = other};
  }
  return {.address = address};
}

bool may_be_known_later(const std::string& host) { return Addresses(host, 0, SOCK_DGRAM).may_come(); }

std::optional<std::string> why_nobody_listens(const std::string& host, uint16_t port) {
  const Addresses addresses(host, port, SOCK_STREAM);
  std::string why;
  for (const addrinfo* target = addresses.first(); target != nullptr; target = target->ai_next) {
    const int error = try_to_connect(*target);
    if (error == 0) return std::nullopt;
    if (why.empty() || error == ECONNREFUSED) why = std::strerror(error);  // a refusal shows that the host was reached
  }
  return why.empty() ? addresses.error() : why;
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
