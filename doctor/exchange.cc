#include "fulgur/doctor/exchange.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include "fulgur/base/environment_variables.h"
#include "fulgur/base/error.h"
#include "fulgur/distributed/network.h"
#include "fulgur/distributed/world.h"
#include "fulgur/launch/launcher_variables.h"
#include "fulgur/launch/rendezvous.h"
#include "fulgur/launch/run_distributed.h"

namespace fulgur::doctor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kVariable = "FULGUR_DOCTOR_RANKS";
constexpr double kExchangeS = 1.0;
constexpr double kTimeoutS = 5.0;
constexpr int64_t kElements = 250'000;  // 1 MB of fp32
constexpr int64_t kFirstCalls = 20;     // they are timed to estimate how many calls take kExchangeS

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Calls per second of an all_reduce of 1 MB.
double rate(World& world) {
  const at::Tensor sum = at::full({kElements}, static_cast<double>(world.rank() + 1));
  world.data().all_reduce(sum).wait();
  if (sum.ne(3).any().item<bool>()) throw DistributedError("the sum of 1 and 2 over two ranks is not 3");
  const at::Tensor zeros = at::zeros({kElements}), calls = at::full({1}, kFirstCalls, at::kLong);
  double per_s = 0;
  for (const bool is_estimate : {true, false}) {
    world.control().barrier();
    const auto start = Clock::now();
    for (int64_t i = 0; i < calls.item<int64_t>(); ++i) world.data().all_reduce(zeros).wait();
    per_s = static_cast<double>(calls.item<int64_t>()) / seconds_since(start);
    if (!is_estimate) break;
    calls.fill_(std::max<int64_t>(1, static_cast<int64_t>(per_s * kExchangeS)));
    world.control().broadcast(calls, /*root=*/0).wait();
  }
  return per_s;
}

Check measured(const char* topic, double calls_per_s) {
  return {.topic = topic, .found = fmt::format("two ranks sum 1 MB {:.0f} times a second", calls_per_s)};
}

// Returns nullopt if a connection to the loopback, at which the ranks of a host meet, can be made. With the interface
// down, a program can listen there all the same.
std::optional<std::string> why_no_loopback() try {
  const LoopbackListener listener;
  return why_nobody_listens(listener.address(), listener.port());
} catch (const DistributedError& error) {
  return error.what();
}

}  // namespace

bool is_second_rank() { return find_variable(process_environment_variables(), kVariable).has_value(); }

void prepare_exchange() {
  for (const auto& [name, value] : process_environment_variables()) {
    if (is_launcher_variable(name)) unsetenv(name.c_str());
  }
  setenv(kVariable, "2", /*overwrite=*/1);
}

Checks check_exchange() {
  if (const auto why = why_no_loopback()) {
    return {{.topic = "loopback",
             .found = fmt::format("ranks of this host cannot meet at it: {}", *why),
             .verdict = Verdict::problem,
             .advice = "write ip link set lo up, and let firewalls pass connections to 127.0.0.1"}};
  }
  SessionOptions options{.devices = {c10::kCPU, c10::kCPU},
                         .world = {.timeout_s = kTimeoutS, .connect_timeout_s = kTimeoutS}};
  Checks checks;
  try {
    run_distributed(options, [&](World& world) {
      at::set_num_threads(1);
      checks.push_back(measured("shared memory", rate(world)));
      WorldOptions over_gloo = options.world;
      over_gloo.collectives.shared_memory = false;
      World gloo = connect_again(world, over_gloo);
      checks.push_back(measured("Gloo", rate(gloo)));
      gloo.leave();
    });
  } catch (const std::exception& error) {
    checks.push_back({.topic = checks.empty() ? "shared memory" : "Gloo",
                      .found = fmt::format("two ranks of this host cannot exchange tensors: {}", error.what()),
                      .verdict = Verdict::problem,
                      .advice = checks.empty() ? "does FULGUR_SHARED_MEMORY=0 help? Then ranks use Gloo alone"
                                               : "does a firewall let connections to 127.0.0.1 pass?"});
  }
  return checks;
}

}  // namespace fulgur::doctor
