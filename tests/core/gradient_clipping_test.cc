#include "fulgur/core/gradient_clipping.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/testing/counting_allocator.h"
#include "tests/testing/instruction_sets.h"

namespace fulgur {
namespace {

// A gradient of 64 MiB in fp32, or of 32 MiB in a 16-bit type.
constexpr int64_t kNumElements = 16 << 20;
constexpr int64_t kMostBytesBeside = 8 << 20;

std::vector<at::Tensor> params_with_gradients(const at::Tensor& gradient) {
  at::Tensor param = at::zeros(gradient.sizes(), gradient.options());
  param.mutable_grad() = gradient;
  return {param};
}

TEST(GradientClipping, TakesLittleMemoryBesideALargeGradient) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto params = params_with_gradients(at::full({1 << 10, kNumElements >> 10}, 0.5, dtype));
    double norm = 0.0;
    testing::CountingAllocator memory;
    const int64_t before = memory.live();
    memory.reset_peak();
    norm = gradient_norm(params).item<double>();
    EXPECT_LE(memory.peak() - before, kMostBytesBeside) << dtype;
    clip_gradients(params, {.value = 1.0});
    EXPECT_LE(memory.peak() - before, kMostBytesBeside) << dtype;
    EXPECT_DOUBLE_EQ(norm, 0.5 * std::sqrt(static_cast<double>(kNumElements))) << dtype;
    EXPECT_NEAR(gradient_norm(params).item<double>(), 1.0, 1e-2) << dtype;
  }
}

// Next to 2^30, a 1 counts only in an fp64 sum, and 2^20 ones count only if each is added in fp64.
TEST(GradientClipping, TheNormIsSummedInFp64OverEveryElement) {
  at::Tensor gradient = at::full({(5 << 18) + 3}, 1.0, at::kFloat);
  gradient[7] = 1 << 15;
  gradient[-1] = 3.0;
  const double squares = std::pow(2.0, 30) + 9.0 + static_cast<double>(gradient.numel() - 2);
  EXPECT_DOUBLE_EQ(joint_norm({gradient}).item<double>(), std::sqrt(squares));
  const at::Tensor transposed = at::full({1 << 10, 1 << 11}, 2.0, at::kFloat).t();
  EXPECT_DOUBLE_EQ(joint_norm({gradient, transposed}).item<double>(), std::sqrt(squares + 4.0 * (1 << 21)));
  const at::Tensor expanded = at::full({1}, 2.0, at::kFloat).expand({1 << 21});  // all elements share one address
  EXPECT_DOUBLE_EQ(joint_norm({expanded}).item<double>(), std::sqrt(4.0 * (1 << 21)));
  EXPECT_EQ(joint_norm({}).item<double>(), 0.0);
}

// The oracle adds in long double, one after another.
TEST(GradientClipping, TheNormHasTheSameBitsWithAnyInstructionsAndThreads) {
  const int threads_before = at::get_num_threads();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kHalf}) {
    for (const int64_t size : {0, 1, 31, 33, 1000, (5 << 18) + 3}) {
      SCOPED_TRACE(c10::str(dtype, ", ", size, " elements"));
      const at::Tensor tensor = at::arange(size, at::kDouble).remainder(251).sub(125.0).div(7.0).to(dtype);
      const at::Tensor exact = tensor.to(at::kDouble);
      long double squares = 0.0L;
      for (int64_t i = 0; i < size; ++i) {
        const long double number = exact.const_data_ptr<double>()[i];
        squares += number * number;
      }
      const double norm = joint_norm({tensor}).item<double>();
      EXPECT_NEAR(norm, static_cast<double>(std::sqrt(squares)), 1e-14 * norm);
      testing::on_every_instruction_set([&](const std::string& instructions) {
        EXPECT_EQ(joint_norm({tensor}).item<double>(), norm) << instructions;
      });
      if (dtype == at::kHalf) continue;
      at::set_num_threads(2);
      EXPECT_EQ(joint_norm({tensor}).item<double>(), norm);
      at::set_num_threads(threads_before);
    }
  }
}

TEST(GradientClipping, ANormOfNumbersThatAreNotFiniteIsNotFinite) {
  const at::Tensor finite = at::ones({40}), with_gaps = at::ones({8, 8}).slice(1, 0, 4);
  for (const double bad : {HUGE_VAL, std::nan("")}) {
    at::Tensor spoilt = at::ones({40});
    spoilt.narrow(0, 39, 1).fill_(bad);
    EXPECT_FALSE(std::isfinite(joint_norm({finite, spoilt}).item<double>()));
    EXPECT_FALSE(std::isfinite(joint_norm({spoilt, with_gaps}).item<double>()));
  }
}

TEST(GradientClipping, OnAGpuTheNormIsThatOfTheCpuAndMakesNoCopy) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  const at::Tensor values = at::arange((5 << 18) + 3, at::kDouble).remainder(251);
  std::vector<at::Tensor> on_cpu, on_gpu;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    on_cpu.push_back(values.to(dtype));
    on_gpu.push_back(on_cpu.back().to(at::kCUDA));
  }
  on_cpu.push_back(at::full({3, 5}, 2.0F).t());
  on_gpu.push_back(on_cpu.back().to(at::kCUDA));
  c10::DeviceAllocator& allocator = *c10::getDeviceAllocator(at::kCUDA);
  allocator.resetPeakStats(0);
  const int64_t before = allocator.getDeviceStats(0).allocated_bytes[0].current;
  const at::Tensor norm = joint_norm(on_gpu);
  EXPECT_LE(allocator.getDeviceStats(0).allocated_bytes[0].peak - before, 1 << 20);
  EXPECT_TRUE(norm.is_cuda());
  EXPECT_NEAR(norm.item<double>(), joint_norm(on_cpu).item<double>(), 1e-9 * norm.item<double>());
  EXPECT_EQ(joint_norm(on_gpu).item<double>(), norm.item<double>());
  const ClippedNorm clipped = clip_norm(norm, /*mean=*/0.25, /*max_norm=*/0.5);
  const ClippedNorm expected = clip_norm(norm.cpu(), 0.25, 0.5);
  EXPECT_TRUE(clipped.factor.is_cuda());
  EXPECT_EQ(clipped.norm.item<double>(), expected.norm.item<double>());
  EXPECT_EQ(clipped.factor.item<double>(), expected.factor.item<double>());
}

}  // namespace
}  // namespace fulgur
