#include "fulgur/device/copy_stream.h"

#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <optional>
#include <vector>

namespace fulgur {
namespace {

const c10::Device kGpu(c10::kCUDA, 0);

c10::Stream current_stream() { return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(kGpu); }

// Keeps the current stream busy for some ten milliseconds.
void keep_busy() {
  at::Tensor product = torch::eye(4096, kGpu);
  for (int i = 0; i < 40; ++i) product = product.mm(product);
}

std::vector<at::Tensor> copy_of(const at::Tensor& tensor) { return {tensor.pin_memory().to(kGpu, true)}; }

TEST(CopyStream, CopiesArriveWholeAndStayUntilTheyAreRead) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  CopyStream copies(kGpu);
  std::vector<at::Tensor> is_right;
  for (int i = 0; i < 20; ++i) {
    const auto there = copies.run([i] { return copy_of(torch::full({1 << 18}, i)); });
    keep_busy();
    is_right.push_back(there[0].eq(i).all());
  }
  for (const at::Tensor& right : is_right) EXPECT_TRUE(right.item<bool>());
}

TEST(CopyStream, CopiesRunBesideWhatTheCallerHasQueued) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  CopyStream copies(kGpu);
  const at::Tensor pinned = torch::ones({1 << 18}).pin_memory();
  copies.run([&] { return copy_of(pinned); });
  keep_busy();
  std::optional<c10::Stream> of_copies;
  copies.run([&] {
    of_copies = current_stream();
    return copy_of(pinned);
  });
  of_copies->synchronize();
  EXPECT_FALSE(current_stream().query());
  current_stream().synchronize();
}

TEST(CopyStream, TheHostIsOneCallAhead) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  CopyStream copies(kGpu);
  const at::Tensor pinned = torch::ones({1 << 10}).pin_memory();
  keep_busy();
  c10::Event first_is_done(c10::kCUDA);
  first_is_done.record(current_stream());
  copies.run([&] { return copy_of(pinned); });
  EXPECT_FALSE(first_is_done.query());
  keep_busy();
  copies.run([&] { return copy_of(pinned); });
  EXPECT_TRUE(first_is_done.query());
  EXPECT_FALSE(current_stream().query());
  current_stream().synchronize();
}

}  // namespace
}  // namespace fulgur
