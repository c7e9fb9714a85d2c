#pragma once

#include <cmath>
#include <cstdint>

#include "fulgur/base/device_code.h"

// The joint norm of many tensors on a GPU: one launch reads all tensors, adds in fp64, and leaves the norm on the
// device. Another launch computes the clipping factor from the norm. Every sum adds its numbers in a fixed order, so
// that the bits depend on the tensors alone.
namespace fulgur::gpu {

using device_code::Format;

constexpr uint32_t kMaxTensors = 1200;
constexpr int64_t kBlockElements = 16384;  // elements that a block reads

struct NormRow {
  const void* numbers;
  int64_t num_elements;
  uint32_t first_block;
  Format format;
  bool is_aligned;  // device_code::is_aligned
};

// The argument of the kernel. If one table is too small for all tensors, there are several launches; the block that
// ends last computes the norm.
struct NormLaunch {
  double* sums;        // sums of squares, one for each block of all launches
  uint32_t* num_done;  // blocks of all launches that have written their sum: 0 before the first and after the last
  double* norm;
  uint32_t num_rows, num_blocks;
  uint32_t first_sum;  // the index of the sum of this launch's first block
  uint32_t num_sums;   // the number of blocks of all launches
  NormRow rows[kMaxTensors];
};

// The sum of squares of a thread's share of numbers. The format is known at compile time, so that no branch
// stands between loads.
template <Format kFormat>
FULGUR_DEVICE_CODE double sum_of_share(const NormRow& row, int64_t begin, uint32_t count, uint32_t thread) {
  using device_code::kThreads, device_code::kWidth;
  const uint32_t wide = row.is_aligned ? count / kWidth * kWidth : 0;
  double sums[kWidth] = {};
  FULGUR_DEVICE_UNROLL
  for (uint32_t i = thread * kWidth; i < wide; i += kThreads * kWidth) {
    float numbers[kWidth];
    device_code::load<kWidth>(row.numbers, kFormat, begin + i, numbers);
    for (int k = 0; k < kWidth; ++k) {
      const double number = numbers[k];
      sums[k] = ::fma(number, number, sums[k]);
    }
  }
  for (uint32_t i = wide + thread; i < count; i += kThreads) {
    float value;
    device_code::load<1>(row.numbers, kFormat, begin + i, &value);
    const double number = value;
    sums[0] = ::fma(number, number, sums[0]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The sum that a thread of a block begins with.
FULGUR_DEVICE_CODE double sum_of_thread(const NormLaunch& launch, uint32_t block, uint32_t thread) {
  const NormRow& row = device_code::row_of_block(launch.rows, launch.num_rows, block);
  const int64_t begin = static_cast<int64_t>(block - row.first_block) * kBlockElements;
  const int64_t rest = row.num_elements - begin;
  const auto count = static_cast<uint32_t>(rest < kBlockElements ? rest : kBlockElements);
  if (row.format == Format::fp32) return sum_of_share<Format::fp32>(row, begin, count, thread);
  if (row.format == Format::bf16) return sum_of_share<Format::bf16>(row, begin, count, thread);
  return sum_of_share<Format::fp16>(row, begin, count, thread);
}

// The sum that a thread of the last block begins with, when all sums are there.
FULGUR_DEVICE_CODE double sum_of_sums(const NormLaunch& launch, uint32_t thread) {
  const volatile double* const sums = launch.sums;  // other blocks have written them
  double sum = 0.0;
  for (uint32_t i = thread; i < launch.num_sums; i += device_code::kThreads) sum += sums[i];
  return sum;
}

// A step of the sum over a block's threads: each thread adds the sum of the thread that is `distance` away. The
// distance is kThreads / 2 first, and is halved down to 1. All threads end a step before the next one begins. At the
// end sums[0] is the whole sum.
FULGUR_DEVICE_CODE void add_from(double* sums, uint32_t thread, uint32_t distance) {
  if (thread < distance) sums[thread] += sums[thread + distance];
}

// The argument of the kernel that clips: what core/gradient_clipping.h, clip_norm, computes, on the device.
struct ClipLaunch {
  const double* norm;
  double mean, max_norm;
  double* clipped;  // the norm times the mean; the factor
};

FULGUR_DEVICE_CODE void clip(const ClipLaunch& launch) {
  const double norm = *launch.norm * launch.mean;
  const double coefficient = 1.0 / (norm + 1e-6) * launch.max_norm;
  launch.clipped[0] = norm;
  launch.clipped[1] = (coefficient > 1.0 ? 1.0 : coefficient) * launch.mean;  // a NaN stays NaN
}

static_assert(sizeof(NormLaunch) <= device_code::kMaxArgumentBytes);

}  // namespace fulgur::gpu
