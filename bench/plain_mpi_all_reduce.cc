// MPI_Allreduce of fp32, in place, between the processes that mpirun has started: prints the mean of the microseconds
// that a call takes. Nothing of fulgur is in it. bench/mpi_all_reduce.py runs this program in turn with
// bench/all_reduce.
//   mpirun -n 4 bazel-bin/bench/plain_mpi_all_reduce 25000000 10     (bytes, calls)
#include <mpi/mpi.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("plain_mpi_all_reduce needs bytes and calls, as in: plain_mpi_all_reduce 25000000 10\n", stderr);
    return 2;
  }
  MPI_Init(&argc, &argv);
  int rank = 0, world_size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  std::vector<float> flat(std::strtoull(argv[1], nullptr, 10) / sizeof(float), 1.0F);
  const int num_calls = std::atoi(argv[2]);
  const auto all_reduce = [&] {
    MPI_Allreduce(MPI_IN_PLACE, flat.data(), static_cast<int>(flat.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  for (int i = 0; i < 2; ++i) all_reduce();
  for (float& value : flat) {
    if (value != static_cast<float>(world_size * world_size)) MPI_Abort(MPI_COMM_WORLD, 1);
    value = 0.0F;
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  for (int i = 0; i < num_calls; ++i) all_reduce();
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) std::printf("%.1f\n", (MPI_Wtime() - begin) * 1e6 / num_calls);
  MPI_Finalize();
}
