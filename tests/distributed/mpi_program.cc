// A rank of a run whose tensors MPI moves: mpi_program MODE, started by mpirun; see mpi_transport_test.py.
#include <fmt/format.h>
#include <mpi/mpi.h>
#include <torch/types.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/base/environment_variables.h"
#include "fulgur/distributed/world.h"
#include "fulgur/launch/cluster_environment.h"
#include "fulgur/launch/rendezvous.h"
#include "tests/testing/mapped_memory.h"
#include "tests/testing/rank_values.h"

namespace {

using namespace fulgur;
using fulgur::testing::reduced;
using fulgur::testing::values_of;

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error("expected " + what);
}

void expect_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  expect(found.equal(expected), what);
}

void check_size(Collective& group, int64_t size, at::ScalarType dtype) {
  const int64_t rank = group.rank(), world_size = group.world_size();
  const std::string what = fmt::format("{} elements of {}", size, c10::toString(dtype));
  const ElementRange mine = rank_range(size, rank, world_size);
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
    const at::Tensor everywhere = values_of(rank, size, dtype), scattered = values_of(rank, size, dtype);
    const at::Tensor sent = values_of(rank, size, dtype), into = mine.of(sent).clone();
    Work first = group.all_reduce(everywhere, op), second = group.reduce_scatter(scattered, op);
    Work third = group.reduce_scatter(sent, op, into);
    third.wait();
    first.wait();
    second.wait();
    const at::Tensor expected = reduced(world_size, size, dtype, op);
    expect_equal(everywhere, expected, "all_reduce of " + what);
    expect_equal(mine.of(scattered), mine.of(expected), "reduce_scatter of " + what);
    expect_equal(into, mine.of(expected), "reduce_scatter into another tensor of " + what);
  }
  const at::Tensor gathered = torch::zeros({size}, dtype);
  mine.of(gathered).copy_(mine.of(values_of(7, size, dtype)));
  group.all_gather(gathered).wait();
  expect_equal(gathered, values_of(7, size, dtype), "all_gather of " + what);
  const at::Tensor told = values_of(rank, size, dtype);
  group.broadcast(told, world_size - 1).wait();
  expect_equal(told, values_of(world_size - 1, size, dtype), "broadcast of " + what);
}

void check_all(World& world) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte, at::kBool}) {
    for (const int64_t size : {1, 2, 5, 64, 1003, 70001}) check_size(world.data(), size, dtype);
  }
  std::vector<int64_t> ranks;
  for (int64_t rank = world.world_size() - 1; rank > 0; --rank) ranks.push_back(rank);
  if (const auto others = world.data().sub_group(ranks)) {  // all but rank 0, from the last to the first
    check_size(*others, 1003, at::kFloat);
    others->barrier();
  }
  const at::Tensor small = torch::ones({3});
  for (int i = 0; i < 20; ++i) {  // the all_reduce of one rank may begin before its barrier, of another after it
    Work work = world.data().all_reduce(small.fill_(1));
    world.data().barrier();
    if ((world.rank() + i) % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    work.wait();
    expect_equal(small, torch::full({3}, static_cast<float>(world.world_size())), "an all_reduce beside a barrier");
  }
  world.control().barrier();
}

// Rounding tells the order in which ranks were added.
void check_order(World& world) {
  const int64_t size = 100003, world_size = world.world_size();
  at::Tensor expected;
  at::Tensor mine;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const at::Tensor values = torch::rand({size}, at::detail::createCPUGenerator(static_cast<uint64_t>(rank) + 1));
    expected = rank == 0 ? values.clone() : expected + values;
    if (rank == world.rank()) mine = values;
  }
  const at::Tensor scattered = mine.clone();
  world.data().all_reduce(mine).wait();
  expect_equal(mine, expected, "a sum in the order of ranks");
  world.data().reduce_scatter(scattered).wait();
  const ElementRange range = rank_range(size, world.rank(), world_size);
  expect_equal(range.of(scattered), range.of(expected), "scattered sums in the order of ranks");
}

void exchange_for_ever(World& world, int64_t victim, const std::string& mode) {
  for (int64_t step = 0;; ++step) {
    world.set_step(step);
    if (step == 5 && world.rank() == victim) {
      if (mode == "throws") throw std::runtime_error("boom");
      if (mode == "exits") std::_Exit(3);
      if (mode == "is killed") std::raise(SIGKILL);
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
    world.data().all_reduce(torch::full({100000}, 1.0F)).wait();
  }
}

void run(World& world, const std::string& mode) {
  if (mode == "all" || mode == "two levels") {
    expect((fulgur::testing::num_mapped_regions() > 0) == (mode == "two levels"),
           "ranks of a host to share its memory if there are several hosts");
    return check_all(world);
  }
  if (mode == "order") return check_order(world);
  exchange_for_ever(world, 1, mode);
}

}  // namespace

int main(int, char** argv) {
  const std::string mode = argv[1];
  const bool one_may_not_call_it = mode == "one is initialised";
  const bool initialises_mpi = one_may_not_call_it || std::getenv("INITIALISES_MPI") != nullptr;
  if (mode == "initialised") MPI_Init(nullptr, nullptr);
  if (initialises_mpi) {
    const bool is_the_one = one_may_not_call_it && std::string(std::getenv("OMPI_COMM_WORLD_RANK")) == "1";
    int threads = 0;
    MPI_Init_thread(nullptr, nullptr, is_the_one ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE, &threads);
  }
  const auto environment = detect_cluster_environment(process_environment_variables());
  const int64_t rank = environment->rank;
  WorldOptions options{.timeout_s = mode == "hangs" ? 2.0 : 60.0, .connect_timeout_s = 60, .heartbeat_interval_s = 0.1};
  options.collectives.kind = TransportKind::mpi;
  options.collectives.staging_bytes = 65536;
  try {
    World world = connect_world(*environment, options, [] {});
    try {
      run(world, mode);
      world.leave();
    } catch (const std::exception& error) {
      world.abort(error.what());
      fmt::print(stderr, "rank {}: {}\n", rank, error.what());
      world.wait_for_others();
      return 1;
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    std::this_thread::sleep_for(std::chrono::seconds(2));  // mpirun ends the other ranks when the first one exits
    return 1;
  }
  if (initialises_mpi) MPI_Finalize();
  fmt::print("rank {} is done\n", rank);
}
