// Collectives between processes of this host, through shared memory and over Gloo: their time, and the bytes on the
// loopback interface relative to the fewest possible. c10d's own all_reduce, which is Gloo's, comes first.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:collectives -- 2     (ranks; optionally followed by bytes of staging)
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/distributed/world.h"
#include "fulgur/launch/rendezvous.h"
#include "fulgur/launch/run_distributed.h"

namespace {

using namespace fulgur;

// Bytes that all processes of this host have sent on the loopback interface so far.
double loopback_bytes() {
  double bytes = 0;
  std::ifstream("/sys/class/net/lo/statistics/tx_bytes") >> bytes;
  return bytes;
}

void print_traffic(World& world, const bench::Contender& contender, double tensor_bytes) {
  world.control().barrier();
  const double before = loopback_bytes();
  contender.run();
  const double sent = loopback_bytes() - before;
  const double least = 2.0 * static_cast<double>(world.world_size() - 1) * tensor_bytes;
  if (world.rank() == 0) fmt::print("{:<40} {:>9.3f} bytes over the least\n", contender.name, sent / least);
}

void compare(World& world, World& gloo, int64_t num_megabytes) {
  const at::Tensor flat = at::zeros({num_megabytes * 1000 * 1000 / 4});  // zeros, which sums do not change
  const auto together = [&](auto call) {
    return [&, call] {
      call();
      world.control().barrier();
    };
  };
  const auto all_reduce = [&](World& of) { return together([&] { of.data().all_reduce(flat).wait(); }); };
  const auto scatter = [&](World& of) { return together([&] { of.data().reduce_scatter(flat).wait(); }); };
  const auto gather = [&](World& of) { return together([&] { of.data().all_gather(flat).wait(); }); };
  const auto scatter_gather = [&](World& of) {
    return together([&] {
      of.data().reduce_scatter(flat).wait();
      of.data().all_gather(flat).wait();
    });
  };
  if (world.rank() == 0) fmt::print("{} ranks, {} MB of fp32\n", world.world_size(), num_megabytes);
  const std::vector<bench::Contender> contenders{
      {"Gloo: all_reduce", all_reduce(gloo)},     {"Gloo: reduce_scatter + all_gather", scatter_gather(gloo)},
      {"shared: all_reduce", all_reduce(world)},  {"shared: reduce_scatter + all_gather", scatter_gather(world)},
      {"shared: reduce_scatter", scatter(world)}, {"shared: all_gather", gather(world)},
  };
  bench::side_by_side("call", 1, contenders, 21);
  for (size_t i = 0; i < 2; ++i) print_traffic(world, contenders[i], static_cast<double>(flat.nbytes()));
}

}  // namespace

int main(int argc, char** argv) {
  return exit_code_of([&] {
    SessionOptions options{.devices = std::vector<c10::Device>(argc > 1 ? std::stoull(argv[1]) : 2, c10::kCPU)};
    if (argc > 2) options.world.collectives.staging_bytes = std::stoll(argv[2]);
    run_distributed(options, [&](World& world) {
      at::set_num_threads(1);
      WorldOptions over_gloo = options.world;
      over_gloo.collectives.shared_memory = false;
      World gloo = connect_again(world, over_gloo);
      for (const int64_t num_megabytes : {25, 100}) compare(world, gloo, num_megabytes);
      gloo.leave();
    });
  });
}
