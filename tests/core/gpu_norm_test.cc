// The kernel for the norm without a GPU: loops run what its threads do.
#include "fulgur/core/gpu_norm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "fulgur/core/gradient_clipping.h"

namespace fulgur::gpu {
namespace {

using device_code::kThreads;

template <class SumOfThread>
double sum_over_block(const SumOfThread& sum_of_thread) {
  std::array<double, kThreads> sums{};
  for (uint32_t thread = 0; thread < kThreads; ++thread) sums[thread] = sum_of_thread(thread);
  for (uint32_t distance = kThreads / 2; distance > 0; distance /= 2) {
    for (uint32_t thread = 0; thread < kThreads; ++thread) add_from(sums.data(), thread, distance);
  }
  return sums[0];
}

// What norm_kernels.cu does, with blocks in any order.
double norm_of(const std::vector<at::Tensor>& tensors, unsigned order = 0) {
  std::vector<NormLaunch> launches = plan_norm(tensors);
  if (launches.empty()) return 0.0;
  std::vector<double> sums(launches.front().num_sums, std::nan(""));
  uint32_t num_done = 0;
  double norm = std::nan("");
  for (NormLaunch& launch : launches) {
    launch.sums = sums.data();
    std::vector<uint32_t> blocks(launch.num_blocks);
    for (uint32_t block = 0; block < launch.num_blocks; ++block) blocks[block] = block;
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(order));
    for (const uint32_t block : blocks) {
      sums[launch.first_sum + block] = sum_over_block([&](uint32_t t) { return sum_of_thread(launch, block, t); });
      if (++num_done < launch.num_sums) continue;
      norm = std::sqrt(sum_over_block([&](uint32_t t) { return sum_of_sums(launch, t); }));
    }
  }
  EXPECT_EQ(num_done, sums.size());
  return norm;
}

std::vector<at::Tensor> tensors_of_all_formats() {
  std::vector<at::Tensor> tensors;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t size : {0, 1, 5, 256, 1000, 16384, 16385, 50001}) {
      const at::Tensor values = at::arange(size + 1, at::kDouble).remainder(251).sub(125.0).div(7.0).to(dtype);
      tensors.push_back(values.narrow(0, 0, size));
      tensors.push_back(values.narrow(0, 1, size));  // not aligned
    }
  }
  return tensors;
}

TEST(NormOnGpu, IsThatOfTheCpuInWhateverOrderBlocksEnd) {
  const std::vector<at::Tensor> tensors = tensors_of_all_formats();
  const double norm = norm_of(tensors);
  const double expected = joint_norm(tensors).item<double>();
  EXPECT_NEAR(norm, expected, 1e-14 * expected);
  for (const unsigned order : {1U, 2U}) EXPECT_EQ(norm_of(tensors, order), norm);
}

TEST(NormOnGpu, IsSummedInFp64) {
  at::Tensor gradient = at::full({(5 << 18) + 3}, 1.0, at::kFloat);
  gradient.narrow(0, 7, 1).fill_(1 << 15);
  EXPECT_DOUBLE_EQ(norm_of({gradient}), std::sqrt(std::pow(2.0, 30) + static_cast<double>(gradient.numel() - 1)));
}

TEST(NormOnGpu, OfNumbersThatAreNotFiniteIsNotFinite) {
  for (const double bad : {HUGE_VAL, std::nan("")}) {
    const at::Tensor spoilt = at::ones({40}, at::kHalf);
    spoilt.narrow(0, 39, 1).fill_(bad);
    EXPECT_FALSE(std::isfinite(norm_of({at::ones({40}), spoilt})));
  }
  const at::Tensor largest = at::full({1000}, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(norm_of({largest})));
}

TEST(NormOnGpu, ALongTableIsCutIntoLaunches) {
  const at::Tensor ones = at::ones({2 * kMaxTensors + 5});
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < ones.numel(); ++i) tensors.push_back(ones.narrow(0, i, 1));
  EXPECT_EQ(plan_norm(tensors).size(), 3U);
  EXPECT_DOUBLE_EQ(norm_of(tensors), std::sqrt(static_cast<double>(ones.numel())));
  EXPECT_TRUE(plan_norm({at::ones({0})}).empty());
}

TEST(NormOnGpu, IsMadeAFactorWithTheBitsOfTheCpu) {
  for (const double norm : {0.0, 0.3, 5.0, 1e30, HUGE_VAL, std::nan("")}) {
    for (const double mean : {1.0, 0.25, 1.0 / 3}) {
      std::array<double, 2> clipped{};
      clip({.norm = &norm, .mean = mean, .max_norm = 0.7, .clipped = clipped.data()});
      const ClippedNorm expected = clip_norm(at::full({}, norm, at::kDouble), mean, /*max_norm=*/0.7);
      if (std::isnan(norm)) {
        EXPECT_TRUE(std::isnan(clipped[0]) && std::isnan(clipped[1]));
        EXPECT_TRUE(std::isnan(expected.norm.item<double>()) && std::isnan(expected.factor.item<double>()));
      } else {
        EXPECT_EQ(clipped[0], expected.norm.item<double>());
        EXPECT_EQ(clipped[1], expected.factor.item<double>());
      }
    }
  }
}

TEST(NormOnGpu, TensorsOfACpuAreNotForIt) { EXPECT_FALSE(can_take_norm(at::ones({4}))); }

}  // namespace
}  // namespace fulgur::gpu
