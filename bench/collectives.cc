// Collectives between processes of this host: over Gloo, through shared memory, and in place, on tensors in memory from
// Collective::allocate(). Their time, and the bytes on the loopback interface relative to the fewest possible. c10d's
// own all_reduce, which is Gloo's, comes first.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:collectives -- 2     (ranks; optionally followed by bytes of staging)
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstring>
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
  const int64_t num_elements = num_megabytes * 1000 * 1000 / 4;
  const at::Tensor flat = at::zeros({num_elements});  // zeros, which sums do not change
  const at::Tensor in_place = world.data().allocate(num_elements, at::kFloat);
  const auto together = [&](auto call) {
    return [&, call] {
      call();
      world.control().barrier();
    };
  };
  const auto all_reduce = [&](World& of, const at::Tensor& of_what) {
    return together([&] { of.data().all_reduce(of_what).wait(); });
  };
  const auto scatter = [&](World& of, const at::Tensor& of_what) {
    return together([&] { of.data().reduce_scatter(of_what).wait(); });
  };
  const auto gather = [&](World& of, const at::Tensor& of_what) {
    return together([&] { of.data().all_gather(of_what).wait(); });
  };
  const auto scatter_gather = [&](World& of, const at::Tensor& of_what) {
    return together([&] {
      of.data().reduce_scatter(of_what).wait();
      of.data().all_gather(of_what).wait();
    });
  };
  // What a reduce_scatter and an all_gather have to move, if a rank does nothing but copy.
  const int64_t num_moved = num_elements * (world.world_size() - 1) / world.world_size();
  const auto copy = together([&, from = at::zeros({num_moved}), to = at::zeros({num_moved})] {
    for (int i = 0; i < 2; ++i) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  });
  if (world.rank() == 0) fmt::print("{} ranks, {} MB of fp32\n", world.world_size(), num_megabytes);
  const std::vector<bench::Contender> contenders{
      {"Gloo: all_reduce", all_reduce(gloo, flat)},
      {"Gloo: reduce_scatter + all_gather", scatter_gather(gloo, flat)},
      {"shared: all_reduce", all_reduce(world, flat)},
      {"shared: reduce_scatter + all_gather", scatter_gather(world, flat)},
      {"shared: reduce_scatter", scatter(world, flat)},
      {"shared: all_gather", gather(world, flat)},
      {"in place: all_reduce", all_reduce(world, in_place)},
      {"in place: reduce_scatter + all_gather", scatter_gather(world, in_place)},
      {"in place: reduce_scatter", scatter(world, in_place)},
      {"in place: all_gather", gather(world, in_place)},
      {"memcpy of what must move", copy},
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
