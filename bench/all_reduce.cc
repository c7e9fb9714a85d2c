// An all_reduce of fp32 between processes, on a tensor in memory from Collective::allocate(): prints the mean of the
// microseconds that a call takes. bench/mpi_all_reduce.py runs this program in turn with bench/plain_mpi_all_reduce.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:all_reduce -- 4 25000000 10     (ranks of a host, bytes, calls; then hosts)
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "fulgur/cli/command_line.h"
#include "fulgur/distributed/world.h"
#include "fulgur/launch/run_distributed.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

constexpr int64_t kWarmUp = 2;

void measure(World& world, int64_t num_bytes, int64_t num_calls) {
  const at::Tensor flat = world.data().allocate(num_bytes / 4, at::kFloat);
  flat.fill_(1);
  for (int64_t i = 0; i < kWarmUp; ++i) world.data().all_reduce(flat).wait();
  const float expected = static_cast<float>(world.world_size() * world.world_size());
  TORCH_CHECK(flat.eq(expected).all().item<bool>(), "the sums of ", kWarmUp, " calls are not ", expected);
  flat.zero_();
  world.control().barrier();
  const auto begin = Clock::now();
  for (int64_t i = 0; i < num_calls; ++i) world.data().all_reduce(flat).wait();
  world.control().barrier();
  const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
  if (world.rank() == 0) fmt::print("{:.1f}\n", took.count() / static_cast<double>(num_calls));
}

}  // namespace

int main(int argc, char** argv) {
  return exit_code_of([&] {
    TORCH_CHECK_VALUE(
        argc == 4 || argc == 5,
        "all_reduce needs the ranks of a host, bytes and calls, and may be told how many hosts there are, "
        "as in: all_reduce 4 25000000 10 2");
    const SessionOptions options{.devices = std::vector<c10::Device>(std::stoull(argv[1]), c10::kCPU),
                                 .num_nodes = argc == 5 ? std::stoll(argv[4]) : 1};
    run_distributed(options, [&](World& world) {
      at::set_num_threads(1);
      measure(world, std::stoll(argv[2]), std::stoll(argv[3]));
    });
  });
}
