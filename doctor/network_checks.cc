#include "fulgur/doctor/network_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include "fulgur/base/error.h"
#include "fulgur/distributed/detached_call.h"
#include "fulgur/distributed/network.h"
#include "fulgur/launch/cluster_environment.h"

namespace fulgur::doctor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(5);
constexpr uint16_t kUsualPort = 29500;  // torchrun's default

Check interfaces_check(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables) {
  Check check{.topic = "interfaces", .found = fmt::format("{}", fmt::join(interfaces, ", "))};
  const bool only_loopback = std::ranges::all_of(interfaces, [](const std::string& name) { return name == "lo"; });
  if (interfaces.empty()) {
    check.found = "none";
    check.verdict = Verdict::warning;
    check.advice = "ranks need at least the loopback: start the container with a network";
  } else if (only_loopback) {
    check.found += " alone: ranks of other hosts cannot be reached";
  }
  for (const char* variable : {"FULGUR_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    const auto name = find_variable(variables, variable);
    if (!name) continue;
    const std::string first = name->substr(0, name->find(','));
    check.found += fmt::format("; {}={}", variable, *name);
    if (std::ranges::find(interfaces, first) == interfaces.end()) {
      check.verdict = Verdict::problem;
      check.advice = fmt::format("set {} to one of these interfaces, or unset it", variable);
    }
    break;  // the first one that is set decides
  }
  return check;
}

bool is_refusal(const std::string& why) { return why == std::strerror(ECONNREFUSED); }

// Returns nullopt if a program listens at the port, otherwise the reason why not. Asks until a host has answered or
// kPatience is over: a name server may learn the name of another host after this rank has started.
std::optional<std::string> why_no_connection(const std::string& host, uint16_t port) {
  const auto deadline = Clock::now() + kPatience;
  std::string why = fmt::format("no answer within {} s", kPatience.count());
  while (Clock::now() < deadline) {
    auto answer = detached_call<std::optional<std::string>>([host, port] { return why_nobody_listens(host, port); });
    if (answer.wait_until(deadline) != std::future_status::ready) break;
    const std::optional<std::string> reason = answer.get();
    if (!reason || is_refusal(*reason)) return reason;
    why = *reason;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return why;
}

// The program that is to listen at the master's port.
enum class Listener { rank_0, this_rank, launcher };

Check master_check(const std::string& host, uint16_t port, Listener listener) {
  Check check{.topic = "master", .found = fmt::format("{} port {}", host, port)};
  const std::optional<std::string> why = why_no_connection(host, port);
  if (!why) {
    if (listener != Listener::this_rank) return check;
    check.found += ": another program listens at this port, where rank 0 is to listen";
    check.verdict = Verdict::problem;
    check.advice = "choose another MASTER_PORT, or end the program that has this one";
    return check;
  }
  if (is_refusal(*why) && listener != Listener::launcher) {
    check.found += ": nobody listens yet, as is usual before training starts";
    return check;
  }
  check.found += ": " + *why;
  check.verdict = Verdict::problem;
  check.advice = listener == Listener::launcher
                     ? "check MASTER_ADDR and MASTER_PORT, that torchrun still runs, and firewalls between the hosts"
                     : "check MASTER_ADDR and MASTER_PORT, and firewalls between the hosts";
  return check;
}

// The master that a user has named without any launcher.
std::optional<Check> master_check(const EnvironmentVariables& variables) {
  const auto host = find_variable(variables, "MASTER_ADDR");
  if (!host) return std::nullopt;
  const auto text = find_variable(variables, "MASTER_PORT");
  if (!text) {
    Check check = master_check(*host, kUsualPort, Listener::rank_0);
    check.found += fmt::format(" (MASTER_PORT is not set; {} is its usual value)", kUsualPort);
    return check;
  }
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), port);
  if (error == std::errc{} && end == text->data() + text->size() && port > 0) {
    return master_check(*host, port, Listener::rank_0);
  }
  return Check{.topic = "master",
               .found = fmt::format("{}; MASTER_PORT={} is not a number from 1 to 65535", *host, *text),
               .verdict = Verdict::problem,
               .advice = "set MASTER_PORT to a port that is free on the host of rank 0"};
}

Check launcher_check(const EnvironmentVariables& variables) {
  try {
    const auto cluster = detect_cluster_environment(variables);
    if (!cluster) return {.topic = "launcher", .found = "none: this process would start the ranks of this host itself"};
    return {.topic = "launcher",
            .found = fmt::format("{}: rank {} of {}, {} of {} on this host", cluster->name, cluster->rank,
                                 cluster->world_size, cluster->local_rank, cluster->local_world_size)};
  } catch (const UsageError& error) {  // the message of the error says what to write
    return {.topic = "launcher", .found = error.what(), .verdict = Verdict::problem};
  }
}

}  // namespace

Checks check_network_settings(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables) {
  return {interfaces_check(interfaces, variables), launcher_check(variables)};
}

std::optional<Check> check_master(const EnvironmentVariables& variables) {
  try {
    const auto cluster = detect_cluster_environment(variables);
    if (!cluster) return master_check(variables);
    if (cluster->world_size == 1) return std::nullopt;
    const Listener listener = cluster->launcher_keeps_store ? Listener::launcher
                              : cluster->rank == 0          ? Listener::this_rank
                                                            : Listener::rank_0;
    return master_check(cluster->master_address, cluster->master_port, listener);
  } catch (const UsageError&) {
    return std::nullopt;  // check_network_settings() has the message
  }
}

}  // namespace fulgur::doctor
