// fulgur's collectives over MPI beside MPI's own nonblocking ones, between the processes that mpirun has started. The
// sums of fulgur are added in the order of ranks.
//   OMP_NUM_THREADS=1 mpirun -n 4 bazel-bin/bench/mpi_collectives 25000000     (bytes of fp32)
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mpi/mpi.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur/base/environment_variables.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/distributed/world.h"
#include "fulgur/launch/cluster_environment.h"
#include "fulgur/launch/rendezvous.h"

namespace {

using namespace fulgur;

void wait_for(const std::function<void(MPI_Request*)>& start) {
  MPI_Request request = MPI_REQUEST_NULL;
  start(&request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

void compare(World& world, int64_t num_bytes) {
  const auto part = static_cast<int>(num_bytes / 4 / world.world_size());
  const at::Tensor flat = at::zeros({part * world.world_size()});  // zeros, which sums do not change
  const at::Tensor own = at::zeros({part});
  auto* const all = flat.mutable_data_ptr<float>();
  const auto together = [&](auto call) {
    return [&, call] {
      call();
      world.control().barrier();
    };
  };
  const auto mpi_all_reduce = together([&] {
    wait_for([&](MPI_Request* request) {
      MPI_Iallreduce(MPI_IN_PLACE, all, static_cast<int>(flat.numel()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, request);
    });
  });
  const auto mpi_reduce_scatter = together([&] {
    wait_for([&](MPI_Request* request) {
      MPI_Ireduce_scatter_block(all, own.mutable_data_ptr<float>(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, request);
    });
  });
  if (world.rank() == 0) fmt::print("{} ranks, {} bytes of fp32\n", world.world_size(), flat.nbytes());
  bench::side_by_side("call", 1,
                      {{"MPI_Iallreduce", mpi_all_reduce},
                       {"fulgur's all_reduce over MPI", together([&] { world.data().all_reduce(flat).wait(); })},
                       {"MPI_Ireduce_scatter_block", mpi_reduce_scatter},
                       {"fulgur's reduce_scatter over MPI",
                        together([&] { world.data().reduce_scatter(flat, ReduceOp::sum, own).wait(); })}},
                      15);
}

}  // namespace

int main(int argc, char** argv) {
  return exit_code_of([&] {
    const auto environment = detect_cluster_environment(process_environment_variables());
    TORCH_CHECK_VALUE(argc == 2 && environment, "start it by mpirun, as in: mpirun -n 4 mpi_collectives 25000000");
    if (environment->rank > 0) TORCH_CHECK(std::freopen("/dev/null", "w", stdout) != nullptr);
    at::set_num_threads(1);
    WorldOptions options;
    options.collectives.kind = TransportKind::mpi;
    World world = connect_world(*environment, options, [] {});
    compare(world, std::stoll(argv[1]));
    world.leave();
  });
}
