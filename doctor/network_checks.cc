#include "fulgur/doctor/network_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <exception>
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

Check interfaces_check(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables) {
  Check check{.topic = "interfaces", .found = fmt::format("{}", fmt::join(interfaces, ", "))};
  const bool only_loopback = std::ranges::all_of(interfaces, [](const std::string& name) { return name == "lo"; });
  if (interfaces.empty()) {
    check.found = "none";
    check.verdict = Verdict::warning;
    check.advice = "ranks need at least the loopback: write ip link set lo up, or start the container with a network";
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

// Null if somebody listens there within kPatience. It polls, since a master may start later than this rank.
std::optional<std::string> why_no_master(const std::string& host, uint16_t port) {
  auto answer = detached_call<std::optional<std::string>>([host, port] {
    const auto deadline = Clock::now() + kPatience;
    while (true) {
      auto why = why_nobody_listens(host, port);
      if (!why || Clock::now() > deadline) return why;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  if (answer.wait_for(kPatience) == std::future_status::ready) return answer.get();
  return fmt::format("no answer within {} s", kPatience.count());
}

Check master_check(const std::string& host, uint16_t port) {
  Check check{.topic = "master", .found = fmt::format("{} port {}", host, port)};
  if (const auto why = why_no_master(host, port)) {
    check.found += ": " + *why;
    check.verdict = Verdict::problem;
    check.advice = "check MASTER_ADDR and MASTER_PORT, that rank 0 has been started, and firewalls between the hosts";
  }
  return check;
}

std::optional<uint16_t> port_in(const EnvironmentVariables& variables) {
  const std::string text = find_variable(variables, "MASTER_PORT").value_or("");
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc{} && end == text.data() + text.size() && port > 0 ? std::optional(port) : std::nullopt;
}

}  // namespace

Checks check_network(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables) {
  Checks checks{interfaces_check(interfaces, variables)};
  try {
    const auto cluster = detect_cluster_environment(variables);
    if (!cluster) {
      checks.push_back({.topic = "launcher", .found = "none: this process would start the ranks of this host itself"});
      const auto host = find_variable(variables, "MASTER_ADDR");
      const auto port = port_in(variables);
      if (host && port) checks.push_back(master_check(*host, *port));
      return checks;
    }
    checks.push_back({.topic = "launcher",
                      .found = fmt::format("{}: rank {} of {}, {} of {} on this host", cluster->name, cluster->rank,
                                           cluster->world_size, cluster->local_rank, cluster->local_world_size)});
    if (cluster->rank != 0 || cluster->launcher_keeps_store) {
      checks.push_back(master_check(cluster->master_address, cluster->master_port));
    }
  } catch (const std::exception& error) {
    checks.push_back({.topic = "launcher",
                      .found = error.what(),  // it says what to write
                      .verdict = Verdict::problem});
  }
  return checks;
}

}  // namespace fulgur::doctor
