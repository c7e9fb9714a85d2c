#include "fulgur/base/job_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fulgur {
namespace {

// Each job fills a buffer that the caller reads once the job is done, as a loader's workers do: a race shows under
// tsan.
TEST(JobQueue, WhatAJobWritesIsThereWhenItIsDone) {
  for (const size_t num_threads : {1, 2, 4}) {
    JobQueue queue(num_threads, {});
    std::deque<std::pair<std::shared_future<void>, std::shared_ptr<std::vector<int64_t>>>> pending;
    int64_t given = 0;
    const auto give = [&] {
      auto buffer = std::make_shared<std::vector<int64_t>>(100);
      pending.emplace_back(queue.run([buffer, first = given++] { std::iota(buffer->begin(), buffer->end(), first); }),
                           buffer);
    };
    for (int i = 0; i < 6; ++i) give();
    for (int64_t i = 0; i < 500; ++i) {
      const auto [done, buffer] = std::move(pending.front());
      pending.pop_front();
      done.get();
      ASSERT_EQ(buffer->front(), i);
      ASSERT_EQ(buffer->back(), i + 99);
      give();
    }
  }
}

TEST(JobQueue, EachThreadIsPreparedBeforeItsFirstJob) {
  static thread_local bool is_prepared = false;
  int num_prepared = 0;  // one thread after another prepares itself
  JobQueue queue(3, [&] {
    is_prepared = true;
    ++num_prepared;
  });
  EXPECT_EQ(num_prepared, 3);
  for (int i = 0; i < 20; ++i) {
    queue
        .run([] {
          if (!is_prepared) throw std::logic_error("not prepared");
        })
        .get();
  }
}

TEST(JobQueue, AnErrorReachesWhoeverWaits) {
  JobQueue queue;
  const auto failed = queue.run([] { throw std::runtime_error("broken"); });
  EXPECT_THROW(failed.get(), std::runtime_error);
  queue.run([] {}).get();
}

TEST(RunParts, RunsEachPartOnce) {
  for (const size_t num_threads : {1, 3}) {
    JobQueue queue(num_threads, {});
    std::vector<int64_t> parts(10, -1);
    run_parts(queue, 10, [&](int64_t p) { parts[static_cast<size_t>(p)] += p + 1; });
    for (int64_t p = 0; p < 10; ++p) EXPECT_EQ(parts[static_cast<size_t>(p)], p);
    run_parts(queue, 0, [](int64_t) { FAIL(); });
  }
}

TEST(RunParts, ThrowsTheErrorOfTheLowestPartWhenAllHaveEnded) {
  JobQueue queue(2, {});
  std::atomic<int64_t> num_ended = 0;
  const auto part = [&](int64_t p) {
    std::this_thread::sleep_for(std::chrono::milliseconds(p));
    ++num_ended;
    if (p % 2 == 1) throw std::runtime_error("part " + std::to_string(p));
  };
  try {
    run_parts(queue, 6, part);
    ADD_FAILURE() << "no part threw";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "part 1");
  }
  EXPECT_EQ(num_ended, 6);
}

TEST(JobQueue, TheDestructorDropsWhatHasNotBegun) {
  std::promise<void> has_begun, may_end;
  std::shared_future<void> running, dropped;
  std::thread lets_it_end;
  {
    JobQueue queue;
    running = queue.run([&] {
      has_begun.set_value();
      may_end.get_future().wait();
    });
    dropped = queue.run([] {});
    has_begun.get_future().wait();
    lets_it_end = std::thread([&, dropped] {
      dropped.wait();  // until the destructor drops it
      may_end.set_value();
    });
  }
  lets_it_end.join();
  running.get();
  EXPECT_THROW(dropped.get(), std::future_error);
}

}  // namespace
}  // namespace fulgur
