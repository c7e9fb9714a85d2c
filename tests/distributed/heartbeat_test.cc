#include "fulgur/distributed/heartbeat.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace fulgur {
namespace {

constexpr std::chrono::milliseconds kInterval(5000), kTimeout(60000);

TEST(Heartbeat, TheRankOfTheStoreLeavesLast) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Heartbeat of_store(store, 0, 0, kInterval, kTimeout);
  auto other = std::make_unique<Heartbeat>(store, 1, 0, kInterval, kTimeout);
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
  Heartbeat first(store, 0, std::nullopt, kInterval, kTimeout), second(store, 1, std::nullopt, kInterval, kTimeout);
  const auto start = std::chrono::steady_clock::now();
  first.leave({0, 1});
  EXPECT_LT(std::chrono::steady_clock::now() - start, kInterval);
}

// Counts requests, except for those that write.
class CountingStore final : public c10d::PrefixStore {
 public:
  CountingStore() : PrefixStore("", c10::make_intrusive<c10d::HashStore>()) {}
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    ++num_requests;
    return PrefixStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++num_requests;
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++num_requests;
    return PrefixStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++num_requests;
    return PrefixStore::check(keys);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++num_requests;
    return PrefixStore::multiGet(keys);
  }
  std::atomic<int64_t> num_requests = 0;
};

TEST(Heartbeat, AFailureOfManyRanksTakesFewRequests) {
  constexpr int64_t kNumRanks = 64, kMissing = 5;
  const auto store = c10::make_intrusive<CountingStore>();
  std::deque<Heartbeat> heartbeats;
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    ranks.push_back(rank);
    heartbeats.emplace_back(store, rank, 0, std::chrono::milliseconds(200), kTimeout);
    heartbeats.back().progress("data").number = rank == kMissing ? 0 : 1;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(400));  // all have written where they are
  store->num_requests = 0;
  std::vector<std::string> texts(kNumRanks);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    if (rank == kMissing) continue;
    threads.emplace_back([&, rank] {
      const auto place = static_cast<size_t>(rank);
      texts[place] = heartbeats[place].diagnose("data", 1, ranks).text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(store->num_requests, 4 * kNumRanks);
  EXPECT_EQ(texts[0].find("rank 5 is missing: alive, but still at step 0"), 0U) << texts[0];
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    if (rank != kMissing) {
      EXPECT_EQ(texts[static_cast<size_t>(rank)], texts[0]);
    }
  }
}

}  // namespace
}  // namespace fulgur
