#include "fulgur/distributed/heartbeat.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace fulgur {
namespace {

constexpr std::chrono::milliseconds kInterval(5000);

TEST(Heartbeat, TheRankOfTheStoreLeavesLast) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Heartbeat of_store(store, 0, 0, kInterval);
  auto other = std::make_unique<Heartbeat>(store, 1, 0, kInterval);
  std::atomic<bool> other_leaves = false;
  std::thread leaves_later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    other_leaves = true;
    other->leave({0, 1});
  });
  of_store.leave({0, 1});
  EXPECT_TRUE(other_leaves);
  leaves_later.join();
}

TEST(Heartbeat, WaitsForNoneWhereTheStoreOutlivesTheRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Heartbeat first(store, 0, std::nullopt, kInterval), second(store, 1, std::nullopt, kInterval);
  const auto start = std::chrono::steady_clock::now();
  first.leave({0, 1});
  EXPECT_LT(std::chrono::steady_clock::now() - start, kInterval);
}

}  // namespace
}  // namespace fulgur
