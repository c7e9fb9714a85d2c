#include "fulgur/core/norm_launch.h"

using namespace fulgur::gpu;
using fulgur::device_code::kThreads;

// The sum over the threads of a block, for its first thread.
__device__ double sum_over_block(double* sums, double sum_of_this_thread) {
  sums[threadIdx.x] = sum_of_this_thread;
  __syncthreads();
  for (uint32_t distance = kThreads / 2; distance > 0; distance /= 2) {
    add_from(sums, threadIdx.x, distance);
    __syncthreads();
  }
  return sums[0];
}

extern "C" __global__ void fulgur_clip(const __grid_constant__ ClipLaunch launch) {
  if (threadIdx.x == 0) clip(launch);
}

extern "C" __global__ void __launch_bounds__(kThreads) fulgur_norm(const __grid_constant__ NormLaunch launch) {
  __shared__ double sums[kThreads];
  __shared__ bool is_last;
  const double of_block = sum_over_block(sums, sum_of_thread(launch, blockIdx.x, threadIdx.x));
  if (threadIdx.x == 0) {
    launch.sums[launch.first_sum + blockIdx.x] = of_block;
    __threadfence();  // the sum is there before it is counted
    is_last = atomicAdd(launch.num_done, 1) == launch.num_sums - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const double squares = sum_over_block(sums, sum_of_sums(launch, threadIdx.x));
  if (threadIdx.x != 0) return;
  *launch.norm = sqrt(squares);
  *launch.num_done = 0;
}
