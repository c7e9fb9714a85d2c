#include "fulgur/device/host_arena.h"

#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr int64_t kTebibyte = int64_t{1} << 40;

// Sets FULGUR_HOST_MEMORY_GIB while an instance lives.
class ScopedHostMemory {
 public:
  explicit ScopedHostMemory(const char* gib) { ::setenv("FULGUR_HOST_MEMORY_GIB", gib, /*overwrite=*/1); }
  ~ScopedHostMemory() { ::unsetenv("FULGUR_HOST_MEMORY_GIB"); }
  ScopedHostMemory(const ScopedHostMemory&) = delete;
  ScopedHostMemory& operator=(const ScopedHostMemory&) = delete;
};

TEST(HostArena, WhatTheUserSaysOfTheMemoryTakesThePlaceOfWhatTheSystemSays) {
  EXPECT_THAT(message_of<UsageError>([] { HostArena(512 * kTebibyte); }), HasSubstr("set FULGUR_HOST_MEMORY_GIB"));
  const ScopedHostMemory little("0.5");
  EXPECT_EQ(HostArena::available_bytes(), 512 * kMebibyte);
  EXPECT_THAT(message_of<UsageError>([] { HostArena(300 * kMebibyte, {.processes = 2}); }),
              HasSubstr("needs 0.29 GiB of host memory, but 0.25 GiB are available"));
  const ScopedHostMemory much("2e6");
  EXPECT_EQ(HostArena(kTebibyte).num_bytes(), kTebibyte);  // no page of it is touched
}

TEST(HostArena, WhatTheUserSaysIsANumber) {
  for (const char* const wrong : {"", "much", "-1", "0", "12GiB", "nan", "inf"}) {
    const ScopedHostMemory told(wrong);
    EXPECT_THAT(message_of<UsageError>([] { HostArena::available_bytes(); }),
                AllOf(HasSubstr("FULGUR_HOST_MEMORY_GIB is '"), HasSubstr("such as 96")))
        << wrong;
  }
}

int64_t pages_there(const at::Tensor& memory) {
  constexpr size_t kPageBytes = 4096;
  std::vector<unsigned char> is_there((memory.nbytes() + kPageBytes - 1) / kPageBytes);
  EXPECT_EQ(::mincore(memory.data_ptr(), memory.nbytes(), is_there.data()), 0);
  return std::ranges::count_if(is_there, [](unsigned char page) { return (page & 1U) != 0; });
}

TEST(HostArena, OnlyMemoryToBePinnedIsTouched) {
  const int64_t num_bytes = 64 * kMebibyte + 4096 + 64;
  EXPECT_EQ(pages_there(HostArena(num_bytes).take(num_bytes, at::kByte)), 0);
  HostArena pinned(num_bytes, {.pinned = true});
  const at::Tensor memory = pinned.take(num_bytes, at::kByte);
  EXPECT_EQ(pages_there(memory), 64 * 256 + 2);
  EXPECT_FALSE(memory.any().item<bool>());
}

}  // namespace
}  // namespace fulgur
