#include "fulgur/base/parallel_chunks.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace fulgur {
namespace {

TEST(ParallelChunks, CoverTheRangeOnceOnSeveralThreads) {
  at::set_num_threads(2);
  constexpr int64_t kSize = 1000;
  const std::vector<char> memory(kSize);
  std::vector<int> visits(kSize);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  parallel_chunks(memory.data(), kSize, /*grain=*/100, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  EXPECT_THAT(visits, ::testing::Each(1));
  EXPECT_EQ(threads.size(), 2U);
  parallel_chunks(memory.data(), 0, 100, [](int64_t, int64_t) { ADD_FAILURE(); });
}

TEST(ParallelChunks, OfFewElementsRunOnTheCaller) {
  at::set_num_threads(2);
  const std::vector<char> memory(50);
  int calls = 0;
  parallel_chunks(memory.data(), 50, /*grain=*/100, [&](int64_t begin, int64_t end) {
    ++calls;
    EXPECT_EQ(end - begin, 50);
  });
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace fulgur
