// What is recorded of a rank whose other ranks are imagined, beside a rank whose others are real.
#include "tools/scaling/record_step.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/strategies/presets.h"
#include "tests/testing/ranks.h"

namespace fulgur::scaling {
namespace {

constexpr ModelShape kShape{.layers = 6, .width = 32};
constexpr int64_t kModelBytes = 4 * 6 * 12 * 32 * 32;

RankOptions small_buckets() { return {.bucket_cap_mib = 0.03, .first_bucket_mib = 0.01}; }

std::vector<StrategyChoice> strategies() {
  return {Ddp(small_buckets()), DdpSharded{.ranks = small_buckets()},
          DdpSharded{.shard_group = "2", .ranks = small_buckets()},
          ZeroOffload{.host = {.update_threads = 1}, .ranks = small_buckets()}};
}

int64_t launched_bytes(const RecordedStep& step, Exchange exchange, Scope scope) {
  int64_t num_bytes = 0;
  for (const Event& event : step.events) {
    const bool counts = event.kind == Event::Kind::launch && event.exchange == exchange && event.scope == scope;
    if (counts) num_bytes += event.num_bytes;
  }
  return num_bytes;
}

// The events whose order does not depend on how long the other ranks take, with launches numbered among themselves.
std::vector<Event> of_training_thread(const RecordedStep& step) {
  std::vector<Event> events;
  std::map<int64_t, int64_t> ids;
  for (Event event : step.events) {
    if (event.lane > 0) continue;
    if (event.kind == Event::Kind::launch) ids.try_emplace(event.id, std::ssize(ids));
    if (event.kind == Event::Kind::launch || event.kind == Event::Kind::wait) event.id = ids.at(event.id);
    events.push_back(event);
  }
  return events;
}

RecordedStep with_real_ranks(const StrategyChoice& strategy, int64_t world_size) {
  RecordedStep of_rank_0;
  testing::run_ranks(world_size, [&](World& real) {
    const auto recorder = std::make_shared<Recorder>(/*lazily=*/false);
    const auto unowned = [](Collective& group) { return std::shared_ptr<Collective>(&group, [](Collective*) {}); };
    World world(std::make_shared<RecordingCollective>(recorder, Scope::world, unowned(real.data())),
                std::make_shared<RecordingCollective>(recorder, Scope::control, unowned(real.control())));
    const RecordedStep mine = record_step(strategy, kShape, "32", world, recorder);
    if (real.rank() == 0) of_rank_0 = mine;
  });
  return of_rank_0;
}

TEST(RecordStepTest, ImaginedRanksGiveTheEventsOfRealOnes) {
  for (const StrategyChoice& strategy : strategies()) {
    const auto imagined = of_training_thread(record_step(strategy, kShape, "32", 4));
    const auto real = of_training_thread(with_real_ranks(strategy, 4));
    EXPECT_GT(imagined.size(), 40U);
    EXPECT_TRUE(imagined == real) << strategy.name();
  }
}

// The kinds of events, one after another. Sizes are left out, and what follows from sizes: the number of pieces in
// which a rank updates its shard, and whether a bucket gets the memory of a longer one or waits for that of another.
std::vector<std::string> order_of(const RecordedStep& step) {
  std::vector<std::string> order;
  for (const Event& event : of_training_thread(step)) {
    const std::string text = fmt::format("kind {}, id {}, exchange {}, scope {}", fmt::underlying(event.kind), event.id,
                                         fmt::underlying(event.exchange), fmt::underlying(event.scope));
    const bool goes_on = event.kind == Event::Kind::update && !order.empty() && order.back() == text;
    if (!goes_on && event.kind != Event::Kind::wait) order.push_back(text);
  }
  return order;
}

// A step of few ranks is replayed as one of many, with other sizes.
TEST(RecordStepTest, TheOrderOfEventsDoesNotDependOnTheNumberOfRanks) {
  for (const StrategyChoice& strategy : strategies()) {
    const auto of_few = order_of(record_step(strategy, kShape, "32", 4));
    for (const int64_t many : {6, 64, 1024}) {
      EXPECT_THAT(order_of(record_step(strategy, kShape, "32", many)), ::testing::ElementsAreArray(of_few))
          << strategy.name() << " on " << many << " ranks";
    }
  }
}

TEST(RecordStepTest, SharedGradientsAndParametersTravelOnce) {
  const RecordedStep step = record_step(DdpSharded{.ranks = small_buckets()}, kShape, "32", 2);
  EXPECT_EQ(launched_bytes(step, Exchange::reduce_scatter, Scope::world), kModelBytes);
  EXPECT_EQ(launched_bytes(step, Exchange::all_gather, Scope::world), kModelBytes);
  EXPECT_EQ(step.shards, 2);
}

TEST(RecordStepTest, OnlyShardsCrossGroups) {
  const RecordedStep step = record_step(DdpSharded{.shard_group = "2", .ranks = small_buckets()}, kShape, "32", 4);
  EXPECT_EQ(launched_bytes(step, Exchange::reduce_scatter, Scope::within), kModelBytes);
  EXPECT_EQ(launched_bytes(step, Exchange::all_gather, Scope::within), kModelBytes);
  EXPECT_EQ(launched_bytes(step, Exchange::all_reduce, Scope::across), kModelBytes / 2);
  EXPECT_EQ(launched_bytes(step, Exchange::all_reduce, Scope::world), 0);
  EXPECT_EQ(step.shards, 2);
}

TEST(RecordStepTest, BucketsAreSentWhileBackwardRuns) {
  const RecordedStep step = record_step(Ddp(small_buckets()), kShape, "32", 2);
  const auto is = [](Event::Kind kind) { return [kind](const Event& event) { return event.kind == kind; }; };
  const auto first = std::ranges::find_if(step.events, is(Event::Kind::launch));
  const auto end = std::ranges::find_if(step.events, is(Event::Kind::backward));
  EXPECT_GT(std::count_if(first, end, is(Event::Kind::gradient)), 18);  // after the first launch, among 24
  EXPECT_EQ(std::count_if(step.events.begin(), end, is(Event::Kind::gradient)), 24);
}

// The engine lets two gradients be on their way to the host, where each is a bucket of its own. That shows only in
// events whose order is that in which they needed each other.
TEST(RecordStepTest, OffloadedGradientsWaitForMemory) {
  const RankOptions each_alone{.bucket_cap_mib = 0.001, .first_bucket_mib = 0.001};
  const RecordedStep step =
      record_step(ZeroOffload{.host = {.update_threads = 1}, .ranks = each_alone}, kShape, "32", 2);
  size_t on_their_way = 0, most = 0;
  for (const Event& event : step.events) {
    if (event.scope != Scope::world) continue;
    if (event.kind == Event::Kind::launch && event.exchange == Exchange::reduce_scatter) ++on_their_way;
    if (event.kind == Event::Kind::wait && event.lane > 0) --on_their_way;
    if (event.kind == Event::Kind::backward) break;
    most = std::max(most, on_their_way);
  }
  EXPECT_EQ(most, 2U);  // GradientSums::kPooledBuckets
}

TEST(RecordStepTest, IsTheSameEachTime) {
  for (const StrategyChoice& strategy : strategies()) {
    const RecordedStep first = record_step(strategy, kShape, "32", 4);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(record_step(strategy, kShape, "32", 4).events == first.events);
  }
}

}  // namespace
}  // namespace fulgur::scaling
