#include "fulgur/strategies/engine/gradient_memory.h"

#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

namespace fulgur {
namespace {

constexpr int64_t kLength = GradientMemory::kLeastBytes / 4;  // floats

at::Tensor zero_bytes(int64_t num_bytes) { return at::zeros({num_bytes}, at::kByte); }

// Two regions for kLength floats, which have room for more, and one for twice as many.
GradientMemory three_regions() {
  GradientMemory memory;
  const GradientMemory::Request one{.dtype = at::kFloat, .num_elements = kLength, .region_elements = kLength + 8};
  const GradientMemory::Request twice{.dtype = at::kFloat, .num_elements = 2 * kLength, .region_elements = 2 * kLength};
  memory.add({one, one, twice}, zero_bytes);
  return memory;
}

at::Tensor made(int64_t length = kLength) { return at::empty({length}); }

TEST(GradientMemory, ATensorOfExactlyThatSizeGetsAFreeRegion) {
  const GradientMemory memory = three_regions();
  const ScopedGradientMemory scope = memory.open();
  const at::Tensor one = made(), shorter = made(kLength - 1), longer = made(kLength + 1), twice = made(2 * kLength),
                   other = made().view({16, -1}), third = made();
  const at::Tensor first = memory.region_of(one), second = memory.region_of(other);
  ASSERT_TRUE(first.defined());
  ASSERT_TRUE(second.defined());
  EXPECT_NE(first.data_ptr(), second.data_ptr());
  EXPECT_EQ(first.data_ptr(), one.data_ptr());
  EXPECT_EQ(first.numel(), kLength + 8);
  EXPECT_EQ(memory.region_of(twice).numel(), 2 * kLength);
  for (const at::Tensor& elsewhere : {shorter, longer, third, one.narrow(0, 1, 5), one.narrow(0, 0, 5)}) {
    EXPECT_FALSE(memory.region_of(elsewhere).defined()) << elsewhere.sizes();
  }
  one.fill_(3);
  EXPECT_TRUE(first.narrow(0, 0, kLength).eq(3).all().item<bool>());
  EXPECT_TRUE(first.narrow(0, kLength, 8).eq(0).all().item<bool>());
}

TEST(GradientMemory, OnlyInAScopeOfTheSameThread) {
  const GradientMemory memory = three_regions();
  EXPECT_FALSE(memory.region_of(made()).defined());
  {
    const ScopedGradientMemory scope = memory.open();
    bool is_in_region = true;
    std::thread([&] { is_in_region = memory.region_of(made()).defined(); }).join();
    EXPECT_FALSE(is_in_region);
    EXPECT_TRUE(memory.region_of(made()).defined());
  }
  EXPECT_FALSE(memory.region_of(made()).defined());
}

TEST(GradientMemory, TheInnermostScopeCounts) {
  const GradientMemory outer = three_regions(), inner = three_regions();
  const ScopedGradientMemory of_outer = outer.open();
  {
    const ScopedGradientMemory nothing_changes;
    EXPECT_TRUE(outer.region_of(made()).defined());
    const ScopedGradientMemory of_inner = inner.open();
    EXPECT_TRUE(inner.region_of(made()).defined());
  }
  EXPECT_TRUE(outer.region_of(made()).defined());
}

TEST(GradientMemory, ARegionIsFreeWhenTheLastTensorInItIsGone) {
  const GradientMemory memory = three_regions();
  const ScopedGradientMemory scope = memory.open();
  at::Tensor whole = made();
  const void* const place = whole.data_ptr();
  at::Tensor part = whole.narrow(0, 10, 5);
  whole.reset();
  EXPECT_NE(made().data_ptr(), place);
  std::thread([&] { part.reset(); }).join();
  EXPECT_EQ(made().data_ptr(), place);
}

TEST(GradientMemory, MakesTensorsOfADtypeInFreeRegions) {
  GradientMemory memory;
  EXPECT_FALSE(memory.make(at::kFloat, kLength).defined());
  memory.add({{.dtype = at::kFloat, .num_elements = kLength, .region_elements = kLength},
              {.dtype = at::kBFloat16, .num_elements = 2 * kLength, .region_elements = 2 * kLength}},
             zero_bytes);
  at::Tensor halves = memory.make(at::kBFloat16, 2 * kLength);
  EXPECT_EQ(memory.region_of(halves).scalar_type(), at::kBFloat16);
  EXPECT_EQ(halves.sizes(), at::IntArrayRef({2 * kLength}));
  EXPECT_FALSE(memory.make(at::kBFloat16, 2 * kLength).defined());  // the region for floats has as many bytes
  const void* const place = halves.data_ptr();
  halves.reset();
  EXPECT_EQ(memory.make(at::kBFloat16, 2 * kLength).data_ptr(), place);
  const ScopedGradientMemory scope = memory.open();
  const at::Tensor one = made(), other = made();  // an allocator does not know the dtype
  EXPECT_NE(memory.region_of(one).defined(), memory.region_of(other).defined());
}

TEST(GradientMemory, TensorsMayOutliveIt) {
  at::Tensor kept, another;
  {
    const GradientMemory memory = three_regions();
    const ScopedGradientMemory scope = memory.open();
    kept = made();
    another = memory.make(at::kFloat, kLength);
  }
  kept.fill_(2);
  another.fill_(3);
  EXPECT_TRUE(kept.eq(2).all().item<bool>());
}

TEST(GradientMemory, TakesManyRegions) {
  constexpr int64_t kNumRegions = 300;
  GradientMemory memory;
  const GradientMemory::Request one{.dtype = at::kFloat, .num_elements = kLength, .region_elements = kLength};
  int num_calls = 0;
  memory.add(std::vector(kNumRegions, one), [&](int64_t num_bytes) {
    ++num_calls;
    return at::empty({num_bytes}, at::kByte);
  });
  EXPECT_EQ(num_calls, 1);
  memory.add({one}, zero_bytes);
  const ScopedGradientMemory scope = memory.open();
  std::vector<at::Tensor> tensors;
  std::set<const void*> places;
  for (int64_t i = 0; i <= kNumRegions; ++i) {
    EXPECT_TRUE(memory.region_of(tensors.emplace_back(made())).defined()) << i;
    places.insert(tensors.back().data_ptr());
  }
  EXPECT_EQ(places.size(), kNumRegions + 1);
  EXPECT_FALSE(memory.region_of(made()).defined());
}

// oneDNN takes memory so.
TEST(GradientMemory, RawMemoryMayLieInRegions) {
  const GradientMemory memory = three_regions();
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  std::vector<void*> raw;
  {
    const ScopedGradientMemory scope = memory.open();
    for (int i = 0; i < 4; ++i) {
      raw.push_back(allocator.raw_allocate(4 * kLength));
      std::memset(raw.back(), i, 4 * kLength);
    }
    EXPECT_FALSE(memory.region_of(made()).defined());
  }
  for (void* const one : raw) allocator.raw_deallocate(one);
  const ScopedGradientMemory scope = memory.open();
  EXPECT_TRUE(memory.region_of(made()).defined());
}

TEST(GradientMemory, AutogradMakesTheGradientOfAWeightThere) {
  const GradientMemory memory = three_regions();
  const at::Tensor weight = at::ones({512, kLength / 512}).requires_grad_();
  const at::Tensor x = at::full({3, kLength / 512}, 2.0);
  const at::Tensor loss = x.mm(weight.t()).sum();
  {
    const ScopedGradientMemory scope = memory.open();
    loss.backward();
  }
  EXPECT_TRUE(memory.region_of(weight.grad()).defined());
  EXPECT_TRUE(weight.grad().eq(6).all().item<bool>());
}

// The backward of a convolution takes memory of the weight's size for itself, too.
TEST(GradientMemory, GradientsOfAConvolutionAreTheSameAsWithoutIt) {
  const at::Tensor x = torch::randn({2, 256, 6, 6}).requires_grad_();
  const at::Tensor weight = torch::randn({256, 256, 3, 3}).requires_grad_();
  GradientMemory memory;
  const GradientMemory::Request one{
      .dtype = at::kFloat, .num_elements = weight.numel(), .region_elements = weight.numel()};
  memory.add({one, one}, zero_bytes);
  std::vector<at::Tensor> expected;
  for (int step = 0; step < 3; ++step) {
    for (const at::Tensor& leaf : {x, weight}) leaf.mutable_grad().reset();
    const at::Tensor loss = at::conv2d(x, weight, {}, 1, 1).square().sum();
    if (step == 0) {
      loss.backward();
      expected = {x.grad(), weight.grad()};
      continue;
    }
    const ScopedGradientMemory scope = memory.open();
    loss.backward();
    EXPECT_TRUE(x.grad().equal(expected[0]));
    EXPECT_TRUE(weight.grad().equal(expected[1]));
  }
}

}  // namespace
}  // namespace fulgur
