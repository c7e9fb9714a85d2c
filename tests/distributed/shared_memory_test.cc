#include "fulgur/distributed/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/distributed/network.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::message_of;
using Memory = std::shared_ptr<SharedMemory>;

struct Asked {
  std::vector<SharedMemory::ChannelOptions> channels{{.outbox_bytes = 64, .spin = {}}};
  bool willing = true;
};

// Connects ranks, each a thread, and returns the memory of each.
std::vector<Memory> connect(const std::vector<Asked>& by_rank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Memory> memories(by_rank.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    threads.emplace_back([&, rank] {
      GroupConfig group{
          .name = "test", .store = store, .ranks = {}, .rank = static_cast<int64_t>(rank), .timeout = seconds(20)};
      for (size_t i = 0; i < by_rank.size(); ++i) group.ranks.push_back(static_cast<int64_t>(i) + 10);
      memories[rank] = SharedMemory::connect(group, by_rank[rank].channels, by_rank[rank].willing);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return memories;
}

SharedMemory::Clock::time_point soon() { return SharedMemory::Clock::now() + milliseconds(100); }
SharedMemory::Clock::time_point late() { return SharedMemory::Clock::now() + seconds(20); }

constexpr SharedMemory::Channel::Call kCall{.name = "test", .num_bytes = 8};

void put(SharedMemory::Channel& channel, int64_t value) {
  std::memcpy(channel.open(late()), &value, sizeof value);
  channel.send(kCall);
}

int64_t take(SharedMemory::Channel& channel, int64_t peer) {
  int64_t value = 0;
  std::memcpy(&value, channel.receive(peer, kCall, late()), sizeof value);
  return value;
}

TEST(SharedMemory, IsUsedOnlyIfAllRanksCanAndAskForTheSame) {
  for (const Memory& memory : connect({{}, {}, {}})) EXPECT_NE(memory, nullptr);
  const Asked unwilling{.willing = false};
  const Asked larger{.channels = {{.outbox_bytes = 128, .spin = {}}}};
  const auto said_without = [](const Asked& other) {
    ::testing::internal::CaptureStderr();
    for (const Memory& memory : connect({{}, {}, other})) EXPECT_EQ(memory, nullptr);
    for (const Memory& memory : connect({other, {}, {}})) EXPECT_EQ(memory, nullptr);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said_without(unwilling), "");
  const std::string said = said_without(larger), warning = "the ranks are on one host, but exchange over the network";
  EXPECT_THAT(said, HasSubstr(warning));
  EXPECT_EQ(said.find(warning), said.rfind(warning));  // the warning comes once
}

// Many rounds, in which the counters wrap around, with ranks that run ahead of each other.
TEST(SharedMemory, BringsEveryRoundInOrder) {
  const std::vector<Memory> memories = connect({{}, {}, {}});
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      SharedMemory::Channel& channel = memories[static_cast<size_t>(rank)]->channel(0);
      constexpr int64_t kAhead = SharedMemory::kOutboxes;
      for (int64_t round = 0; round < 200 + kAhead; ++round) {
        if (round >= kAhead) {
          for (int64_t peer = 0; peer < 3; ++peer) EXPECT_EQ(take(channel, peer), 100 * (round - kAhead) + peer);
          channel.done();
        }
        if (round < 200) put(channel, 100 * round + rank);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(SharedMemory, WaitsUntilAllAreDoneWithAnOutbox) {
  const std::vector<Memory> memories = connect({{}, {}});
  SharedMemory::Channel& first = memories[0]->channel(0);
  SharedMemory::Channel& second = memories[1]->channel(0);
  for (int64_t round = 0; round < SharedMemory::kOutboxes; ++round) {
    put(first, round);
    put(second, round);
    first.done();
  }
  EXPECT_THAT(message_of<std::runtime_error>([&] { first.open(soon()); }), "timed out");
  second.done();
  EXPECT_NO_THROW(first.open(soon()));
}

TEST(SharedMemory, ToldToGiveUpAllDo) {
  const std::vector<Memory> memories = connect({{}, {}});
  std::thread waits([&] {
    EXPECT_EQ(message_of<std::runtime_error>([&] { take(memories[0]->channel(0), 1); }), "a rank has aborted");
  });
  memories[1]->abort();
  waits.join();
}

TEST(SharedMemory, CanBeTurnedOff) {
  EXPECT_TRUE(allows_shared_memory({}));
  EXPECT_TRUE(allows_shared_memory({{"FULGUR_SHARED_MEMORY", "1"}}));
  EXPECT_FALSE(allows_shared_memory({{"FULGUR_SHARED_MEMORY", "0"}}));
  EXPECT_EQ(message_of<UsageError>([] { allows_shared_memory({{"FULGUR_SHARED_MEMORY", "no"}}); }),
            "FULGUR_SHARED_MEMORY is 'no'; set it to 0 or 1, or leave it unset");
}

TEST(SharedMemory, RefusesAnotherCall) {
  const std::vector<Memory> memories = connect({{}, {}});
  put(memories[1]->channel(0), 1);
  const auto receive = [&](SharedMemory::Channel::Call call) {
    return message_of<std::runtime_error>([&] { memories[0]->channel(0).receive(1, call, late()); });
  };
  EXPECT_EQ(receive({.name = "best", .num_bytes = 8}), "rank 11 calls test of 8 bytes, and this one best of 8 bytes");
  EXPECT_EQ(receive({.name = "test", .num_bytes = 9}), "rank 11 calls test of 8 bytes, and this one test of 9 bytes");
}

}  // namespace
}  // namespace fulgur
