// How long ranks wait for a small all_reduce while a large one is in progress: on the large one's group, whose
// connections it shares, and on a group with connections of its own, as World::control() has. Prints the medians of
// both in us. On two hosts (network namespaces), with links of 1 Gbit/s, after a build of //bench:small_beside_large:
//   LINK_RATE=1gbit python3 tests/launch/two_hosts.py 29777 bazel-bin/bench/small_beside_large 1 100000000 10 2
// The last numbers are the ranks of a host, bytes, calls and hosts.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/cli/command_line.h"
#include "fulgur/distributed/world.h"
#include "fulgur/launch/run_distributed.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kUntilInProgress{5};

// The median of the microseconds that a small all_reduce of `group` takes while a large one is in progress.
double beside_large(World& world, Collective& group, const at::Tensor& large, int64_t num_calls) {
  const at::Tensor small = at::zeros({16}, at::kDouble);
  std::vector<double> took;
  for (int64_t i = 0; i < num_calls; ++i) {
    world.control().barrier();
    Work on_its_way = world.data().all_reduce(large);
    std::this_thread::sleep_for(kUntilInProgress);
    const auto begin = Clock::now();
    group.all_reduce(small).wait();
    took.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    on_its_way.wait();
  }
  const auto middle = took.begin() + std::ssize(took) / 2;
  std::ranges::nth_element(took, middle);
  return *middle;
}

void measure(World& world, int64_t num_bytes, int64_t num_calls) {
  const at::Tensor large = world.data().allocate(num_bytes / 4, at::kFloat);
  for (int round = 0; round < 3; ++round) {
    const double shared = beside_large(world, world.data(), large, num_calls);
    const double own = beside_large(world, world.control(), large, num_calls);
    if (world.rank() == 0) fmt::print("connections of the large one {:10.1f}   of its own {:10.1f}\n", shared, own);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return exit_code_of([&] {
    TORCH_CHECK_VALUE(
        argc == 5 && std::stoll(argv[3]) > 0,
        "small_beside_large needs the ranks of a host, bytes, calls and hosts, as in: small_beside_large 1 "
        "100000000 10 2");
    const SessionOptions options{.devices = std::vector<c10::Device>(std::stoull(argv[1]), c10::kCPU),
                                 .num_nodes = std::stoll(argv[4])};
    run_distributed(options, [&](World& world) {
      at::set_num_threads(1);
      measure(world, std::stoll(argv[2]), std::stoll(argv[3]));
    });
  });
}
