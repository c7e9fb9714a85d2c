#include "fulgur/distributed/heartbeat.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/distributed/to_milliseconds.h"

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

TEST(Heartbeat, AtTheEndARankThatFallsSilentIsStillNoticed) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("heartbeat/1", std::string("5 12 0 data=3:all_reduce"));
  Heartbeat waits(store, 0, 0, std::chrono::milliseconds(20), std::chrono::milliseconds(100));
  std::promise<void> told;
  waits.set_at_end();
  waits.watch(2, [&] { told.set_value(); });
  ASSERT_EQ(told.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(waits.diagnose("control", 1, {0, 1}).text,
            "rank 1 gives no sign of life (its host has gone, or it hangs); last seen at step 12, in collective 3 of "
            "group 'data' (all_reduce)");
}

// Behaves like a store whose process has ended, once it has gone.
class VanishingStore final : public c10d::PrefixStore {
 public:
  VanishingStore() : PrefixStore("", c10::make_intrusive<c10d::HashStore>()) {}
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (is_gone) {
      was_missed = true;
      throw std::runtime_error("connection reset by peer");
    }
    PrefixStore::set(key, value);
  }
  std::atomic<bool> is_gone = false, was_missed = false;
};

// Returns whether the loss of the store is a failure to a rank that has watched for `at_most` since then.
bool is_failure(std::chrono::milliseconds timeout, bool is_at_end, std::chrono::milliseconds at_most) {
  const auto store = c10::make_intrusive<VanishingStore>();
  store->set("heartbeat/1", std::string("-1 0 1"));
  const auto told = std::make_shared<std::atomic<bool>>(false);
  Heartbeat heartbeat(store, 0, 1, std::chrono::milliseconds(10), timeout);
  heartbeat.watch(2, [told] { *told = true; });
  if (is_at_end) heartbeat.set_at_end();
  store->is_gone = true;
  while (!store->was_missed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto end = std::chrono::steady_clock::now() + at_most;
  while (!*told && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  heartbeat.stop_watching();
  return *told;
}

TEST(Heartbeat, AtTheEndTheRankOfTheStoreMayGoFirst) {
  EXPECT_FALSE(is_failure(kTimeout, /*is_at_end=*/true, std::chrono::milliseconds(150)));
  EXPECT_TRUE(is_failure(std::chrono::milliseconds(30), /*is_at_end=*/true, kTimeout / 3));
  EXPECT_TRUE(is_failure(kTimeout, /*is_at_end=*/false, kTimeout / 3));
}

TEST(ToMilliseconds, DoesNotOverflow) {
  using std::chrono::milliseconds;
  EXPECT_EQ(to_milliseconds(0.25), milliseconds(250));
  for (const double seconds : {1e10, 1e300, std::numeric_limits<double>::infinity()})
    EXPECT_EQ(to_milliseconds(seconds), milliseconds(1'000'000'000'000));
  const auto now = std::chrono::steady_clock::now();
  EXPECT_GT(now + to_milliseconds(std::numeric_limits<double>::infinity()), now);
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
  for (const int64_t rank : ranks) {  // each has written where it is
    const std::string place = rank == kMissing ? " data=0:" : " data=1:";
    while (store->get_to_str("heartbeat/" + std::to_string(rank)).find(place) == std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
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
