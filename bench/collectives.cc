// reduce_scatter + all_gather against all_reduce, between processes of this host: time, and bytes on
// the loopback interface over the least that are needed.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:collectives -- 2     (ranks; then, if wanted, bytes of staging)
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "bench/side_by_side.h"
#include "cli/command_line.h"
#include "distributed/run_distributed.h"

namespace {

using namespace fulgur;

// Bytes sent on the loopback interface so far, by anybody on this host.
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

void compare(World& world, int64_t num_megabytes) {
  Collective& group = world.data();
  const at::Tensor flat = at::zeros({num_megabytes * 1000 * 1000 / 4});  // sums stay zero
  const auto all_reduce = [&] {
    group.all_reduce(flat).wait();
    world.control().barrier();
  };
  const auto scatter_gather = [&] {
    group.reduce_scatter(flat).wait();
    group.all_gather(flat).wait();
    world.control().barrier();
  };
  const auto scatter = [&] {
    group.reduce_scatter(flat).wait();
    world.control().barrier();
  };
  const auto gather = [&] {
    group.all_gather(flat).wait();
    world.control().barrier();
  };
  if (world.rank() == 0) fmt::print("{} ranks, {} MB of fp32\n", world.world_size(), num_megabytes);
  const std::vector<bench::Contender> contenders{{"all_reduce", all_reduce},
                                                 {"reduce_scatter + all_gather", scatter_gather},
                                                 {"reduce_scatter alone", scatter},
                                                 {"all_gather alone", gather}};
  bench::side_by_side("call", 1, contenders, 21);
  for (size_t i = 0; i < 2; ++i) print_traffic(world, contenders[i], static_cast<double>(flat.nbytes()));
}

}  // namespace

int main(int argc, char** argv) {
  return exit_code_of([&] {
    const SessionOptions options{
        .devices = std::vector<c10::Device>(argc > 1 ? std::stoull(argv[1]) : 2, c10::kCPU),
        .world = {.collectives = {.staging_bytes = argc > 2 ? std::stoll(argv[2]) : C10dOptions().staging_bytes}}};
    run_distributed(options, [](World& world) {
      at::set_num_threads(1);
      for (const int64_t num_megabytes : {25, 100}) compare(world, num_megabytes);
    });
  });
}
