// reduce_scatter + all_gather against all_reduce, between processes of this host: time.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:collectives -- 2     (ranks)
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "bench/side_by_side.h"
#include "cli/command_line.h"
#include "distributed/run_distributed.h"

namespace {

using namespace fulgur;

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
  if (world.rank() == 0) fmt::print("{} ranks, {} MB of fp32\n", world.world_size(), num_megabytes);
  bench::side_by_side("call", 1, {{"all_reduce", all_reduce}, {"reduce_scatter + all_gather", scatter_gather}}, 21);
}

}  // namespace

int main(int argc, char** argv) {
  return exit_code_of([&] {
    const DistributedOptions options{.num_devices = argc > 1 ? std::stoll(argv[1]) : 2};
    run_distributed(options, [](World& world) {
      at::set_num_threads(1);
      for (const int64_t num_megabytes : {25, 100}) compare(world, num_megabytes);
    });
  });
}
