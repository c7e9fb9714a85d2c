// The clock, beside formulas.
#include "tools/scaling/replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tools/scaling/calibration.h"
#include "tools/scaling/scenario.h"
#include "tools/scaling/tables.h"

namespace fulgur::scaling {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

Machine machine(double between_bytes_per_s, double latency_s) {
  Machine made;
  made.device = {.name = "some",
                 .flops_per_s = 1e12,
                 .memory_bytes_per_s = kInfinite,
                 .to_host_bytes_per_s = kInfinite,
                 .host_bytes_per_s = kInfinite,
                 .source = ""};
  made.within = {.name = "inner", .bytes_per_s = kInfinite, .latency_s = latency_s, .source = ""};
  made.between = {.name = "outer", .bytes_per_s = between_bytes_per_s, .latency_s = latency_s, .source = ""};
  made.ranks_per_host = 4;
  return made;
}

// A model of 1,000 elements of 2 bytes, whose backward has two halves; after the first half everything is launched.
RecordedStep one_bucket() {
  using enum Event::Kind;
  RecordedStep step{.events = {{.kind = forward},
                               {.kind = gradient, .num_elements = 500},
                               {.kind = launch, .id = 0, .exchange = Exchange::all_reduce, .num_bytes = 2000},
                               {.kind = gradient, .num_elements = 500},
                               {.kind = wait, .id = 0},
                               {.kind = update},
                               {.kind = end}}};
  step.num_params = 1000;
  step.element_bytes = 2;
  step.num_updates = 1;
  return step;
}

// The same with 10 billion elements, on a machine that takes 3 s to compute it.
Workload large() { return {.num_params = 1e10, .param_bytes = 2, .forward_flops = 1e12, .backward_flops = 2e12}; }

TEST(CostOfTest, ARingSendsTwiceTheBytesButForItsOwnPart) {
  const Machine hosts = machine(1e9, 0);
  for (const int64_t ranks : {2, 3, 4, 8, 64}) {
    const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
    const auto cost = [&](Exchange exchange) { return cost_of(exchange, Scope::world, 1e9, ranks, 1, hosts); };
    EXPECT_DOUBLE_EQ(cost(Exchange::all_reduce).bytes_within, 2e9 * others);
    EXPECT_DOUBLE_EQ(cost(Exchange::reduce_scatter).bytes_within, 1e9 * others);
    EXPECT_DOUBLE_EQ(cost(Exchange::all_gather).bytes_within, 1e9 * others);
    EXPECT_DOUBLE_EQ(cost(Exchange::all_reduce).bytes_between, ranks > 4 ? 2e9 * others : 0.0);
    EXPECT_DOUBLE_EQ(cost(Exchange::all_reduce).seconds, ranks > 4 ? 2 * others : 0.0);
  }
  EXPECT_EQ(cost_of(Exchange::all_reduce, Scope::world, 1e9, 1, 1, hosts).seconds, 0.0);
}

// Four ranks of each of eight hosts send their quarter of a gigabyte to the same places of the other hosts.
TEST(CostOfTest, GroupsAcrossHostsShareTheWire) {
  const ExchangeCost cost = cost_of(Exchange::all_reduce, Scope::across, 0.25e9, 32, 4, machine(1e9, 0));
  EXPECT_DOUBLE_EQ(cost.bytes_between, 2e9 * 7 / 8);
  EXPECT_DOUBLE_EQ(cost.seconds, 2.0 * 7 / 8);
  EXPECT_EQ(cost_of(Exchange::all_gather, Scope::within, 1e9, 32, 4, machine(1e9, 0)).bytes_between, 0.0);
}

TEST(CostOfTest, MessagesFollowATree) {
  EXPECT_DOUBLE_EQ(cost_of(Exchange::all_reduce, Scope::world, 0, 32, 1, machine(1e9, 1e-3)).seconds, 2e-3 + 3e-3);
}

TEST(ReplayTest, FreeExchangesLeaveTheTimeOfComputing) {
  EXPECT_DOUBLE_EQ(replay(one_bucket(), large(), machine(kInfinite, 0), 64).step_s, 3.0);
}

// An exchange takes 2 x 20 GB x 7/8 over the wire's bytes a second, and the second half of backward takes 1 s.
TEST(ReplayTest, OnlyWhatBackwardDoesNotHideIsWaitedFor) {
  const double bytes = 2 * 2e10 * 7 / 8;
  const StepTime hidden = replay(one_bucket(), large(), machine(bytes / 0.9, 0), 8);
  EXPECT_DOUBLE_EQ(hidden.step_s, 3.0);
  EXPECT_DOUBLE_EQ(hidden.bytes_between, bytes);
  const StepTime slow = replay(one_bucket(), large(), machine(bytes / 5, 0), 8);
  EXPECT_DOUBLE_EQ(slow.step_s, 3.0 + 5 - 1);
  EXPECT_DOUBLE_EQ(slow.exposed_s, 4.0);
}

// Two micro-batches are recorded, of which only the last one sends.
TEST(ReplayTest, TheFirstMicroBatchIsRepeated) {
  using enum Event::Kind;
  RecordedStep step = one_bucket();
  step.events.insert(step.events.begin(),
                     {{.kind = forward}, {.kind = gradient, .num_elements = 1000}, {.kind = again}});
  Workload workload = large();
  const double bytes = 2 * 2e10 * 7 / 8;
  for (const int micro_batches : {1, 2, 5}) {
    workload.micro_batches = micro_batches;
    const StepTime time = replay(step, workload, machine(bytes / 5, 0), 8);
    EXPECT_DOUBLE_EQ(time.step_s, 3.0 * micro_batches + 5 - 1);
    EXPECT_DOUBLE_EQ(time.bytes_between, bytes);
  }
}

TEST(ReplayTest, AnUpdateReadsAndWritesTheShard) {
  Machine slow = machine(kInfinite, 0);
  slow.device.memory_bytes_per_s = 28e9;
  Workload workload = large();
  workload.shards = 4;
  EXPECT_DOUBLE_EQ(replay(one_bucket(), workload, slow, 4).update_s, 1e10 / 4 * 28 / 28e9);
}

// Ranks that share two cores compute in turns.
TEST(ReplayTest, RanksShareCores) {
  Machine host = machine(kInfinite, 0);
  host.cores_per_host = 2;
  host.ranks_per_host = 8;
  EXPECT_DOUBLE_EQ(replay(one_bucket(), large(), host, 2).step_s, 3.0);
  EXPECT_DOUBLE_EQ(replay(one_bucket(), large(), host, 3).step_s, 4.5);
  EXPECT_DOUBLE_EQ(replay(one_bucket(), large(), host, 8).step_s, 12.0);
}

// An exchange through memory runs beside backward on a core of its own, or else in turn with it. A rank
// reads and writes 2.5 times the bytes of an exchange to sum them, and 2 times to hand them out.
TEST(ReplayTest, ExchangesOfRanksNeedACore) {
  Machine host = machine(kInfinite, 0);
  host.ranks_per_host = 2;
  host.device.memory_bytes_per_s = 2 * 2e10 * (2.5 + 2) / 0.5;  // half a second
  Workload workload = large();
  workload.update_bytes = 0;
  host.cores_per_host = 3;
  EXPECT_DOUBLE_EQ(replay(one_bucket(), workload, host, 2).step_s, 3.0);
  host.cores_per_host = 2;
  EXPECT_DOUBLE_EQ(replay(one_bucket(), workload, host, 2).step_s, 3.5);
}

ScenarioOptions small_scenario() { return {.num_params = 12 * 1024 * 1024 * 4, .width = 1024, .batch = 4}; }

// Forward takes 2 operations for each parameter and token, backward 4, and forward again 2.
TEST(ScenarioTest, FreeExchangesLeaveTheTimeOfComputingForEachStrategy) {
  ScenarioOptions options = small_scenario();
  options.within_gb_s = options.between_gb_s = options.to_host_gb_s = options.host_memory_gb_s = 1e15;
  options.tflops = 1;  // so slow that latency and the update count for nothing
  Scenario scenario(options);
  const double seconds = 8.0 * static_cast<double>(scenario.shape().num_params()) * 4 * 1024 / 1e12;
  for (const Compared strategy : kCompared) {
    EXPECT_NEAR(scenario.weak(strategy, 8)->time.step_s, seconds, 0.01 * seconds) << name_of(strategy);
    EXPECT_GE(scenario.weak(strategy, 8)->time.step_s, seconds);
  }
}

// A strategy that shards sends M bytes of gradients and M of parameters; ddp sends gradients twice, 2 M.
TEST(ScenarioTest, StrategiesSendTheirBytes) {
  Scenario scenario(small_scenario());
  const double model = 2.0 * static_cast<double>(scenario.shape().num_params());
  for (const Compared strategy : {Compared::ddp, Compared::sharded, Compared::offload}) {
    const StepTime time = scenario.weak(strategy, 64)->time;
    EXPECT_NEAR(time.bytes_between, 2 * model * 63 / 64, 0.001 * model) << name_of(strategy);
  }
  const StepTime hybrid = scenario.weak(Compared::hybrid, 64)->time;
  EXPECT_NEAR(hybrid.bytes_between, 2 * model * 7 / 8, 0.001 * model);
  EXPECT_NEAR(hybrid.bytes_within, 2 * model * 7 / 8, 0.001 * model);
  const StepTime offload = scenario.weak(Compared::offload, 64)->time;
  EXPECT_NEAR(offload.bytes_to_host, 2 * model / 64, 0.001 * model);
}

// By default ddp sends the gradients of a step once, and what shards sends them after each micro-batch.
TEST(ScenarioTest, AccumulatedGradientsAreSentAsTheEngineDoes) {
  ScenarioOptions options = small_scenario();
  options.global_batch = 64 * 4 * 3;  // three micro-batches
  Scenario scenario(options);
  const double model = 2.0 * static_cast<double>(scenario.shape().num_params()) * 63 / 64;
  EXPECT_EQ(scenario.strong(Compared::ddp, 64)->micro_batches, 3);
  EXPECT_NEAR(scenario.strong(Compared::ddp, 64)->time.bytes_between, 2 * model, 0.001 * model);
  EXPECT_NEAR(scenario.strong(Compared::sharded, 64)->time.bytes_between, (3 + 1) * model, 0.001 * model);
}

// The article's formula for a rank: 2 bytes of parameters, 2 of gradients and 12 of Adam's state for each element.
TEST(ScenarioTest, MemoryIsThatOfTheArticle) {
  Scenario scenario(small_scenario());
  const auto params = static_cast<double>(scenario.shape().num_params());
  const auto of_rank = [&](Compared strategy) {
    const ModelMemory memory = scenario.weak(strategy, 64)->memory;
    return static_cast<double>(memory.total() - memory.on_host - memory.buckets);
  };
  EXPECT_NEAR(of_rank(Compared::ddp), 16 * params, 0.01 * params);
  EXPECT_NEAR(of_rank(Compared::sharded), (2 + 14.0 / 64) * params, 0.01 * params);
  EXPECT_NEAR(of_rank(Compared::hybrid), (2 + 14.0 / 8) * params, 0.01 * params);
  EXPECT_NEAR(of_rank(Compared::offload), 2 * params, 0.01 * params);
}

TEST(ScenarioTest, StepsGetLongerWithASlowerLinkAndTheOffloadedOnesWithASlowerHost) {
  ScenarioOptions options = small_scenario();
  const auto step_s = [&](Compared strategy) { return Scenario(options).weak(strategy, 64)->time.step_s; };
  const double sharded = step_s(Compared::sharded), offload = step_s(Compared::offload);
  options.host_memory_gb_s = 0.1;
  EXPECT_DOUBLE_EQ(step_s(Compared::sharded), sharded);
  const double update_s = 28e-8 * static_cast<double>(Scenario(options).shape().num_params()) / 64;
  EXPECT_GT(step_s(Compared::offload), std::max(offload, update_s));
  options.between_gb_s = 1;
  EXPECT_GT(step_s(Compared::sharded), 1.5 * sharded);
}

TEST(ScenarioTest, UnknownNamesGetTheNearest) {
  const auto message = [](ScenarioOptions options) {
    return message_of<UsageError>([&] { Scenario scenario(options); });
  };
  EXPECT_THAT(message({.device = "h10"}), HasSubstr("unknown device 'h10'; did you mean 'h100'? known: h100, h200"));
  EXPECT_THAT(message({.between = "40g"}), HasSubstr("unknown link '40g'; did you mean '400g'? known: nvlink"));
  EXPECT_THAT(message({.precision = "32"}), HasSubstr("write bf16-true or bf16-mixed"));
  EXPECT_THAT(message({.num_params = 0}), HasSubstr("--params is 0; write 1 or more"));
}

std::vector<int64_t> ranks_of(const std::vector<TableRow>& rows) {
  std::vector<int64_t> ranks;
  for (const TableRow& row : rows) ranks.push_back(row.ranks);
  return ranks;
}

TEST(TablesTest, RowsAreOfFullHosts) {
  ScenarioOptions options = small_scenario();
  options.max_ranks = 64;
  EXPECT_THAT(Scenario(options).ranks(), ElementsAre(8, 16, 32, 64));
  options.ranks_per_host = 16;
  EXPECT_THAT(Scenario(options).ranks(), ElementsAre(8, 16, 32, 64));
  options.ranks_per_host = 12;
  EXPECT_THAT(Scenario(options).ranks(), ElementsAre(12, 24, 48));
  options.max_ranks = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Scenario(options).ranks().size(), 60u);
  options.ranks_per_host = 6;
  options.max_ranks = 64;
  Scenario scenario(options);
  const std::vector<TableRow> weak = weak_scaling(scenario);
  EXPECT_THAT(ranks_of(weak), ElementsAre(6, 12, 24, 48));
  EXPECT_THAT(ranks_of(strong_scaling(scenario)), ElementsAre(6, 12, 24, 48));
  EXPECT_THAT(crossings(weak), HasSubstr("shard_group=host is ahead of ddp_sharded on 12, 24, 48 ranks"));
  EXPECT_THAT(picture(scenario, weak), Not(HasSubstr("nan")));
}

TEST(TablesTest, FewerRanksThanTheFirstRowHasAreRefused) {
  const auto message = [](int64_t ranks_per_host, int64_t max_ranks) {
    ScenarioOptions options = small_scenario();
    options.ranks_per_host = ranks_per_host;
    options.max_ranks = max_ranks;
    return message_of<UsageError>([&] { Scenario scenario(options); });
  };
  EXPECT_EQ(message(8, 4), "--max_ranks is 4, but the tables begin with 8 ranks; write --max_ranks=8 or more");
  EXPECT_THAT(message(12, 8), HasSubstr("write --max_ranks=12 or more"));
}

TEST(TablesTest, AModelThatFitsNowhereHasAPicture) {
  ScenarioOptions options{.num_params = 1e13, .width = 65536};
  options.max_ranks = 16;
  Scenario scenario(options);
  const std::vector<TableRow> rows = weak_scaling(scenario);
  EXPECT_THAT(ranks_of(rows), ElementsAre(8, 16));
  for (const TableRow& row : rows) {
    ASSERT_FALSE(row.outcomes.empty());
    for (const auto& outcome : row.outcomes) EXPECT_FALSE(outcome);
  }
  EXPECT_THAT(picture(scenario, rows), Not(HasSubstr("nan")));
}

// Steps by the formula of ranks that share cores and memory: with the constants found from one rank and two, those of
// three and four come out.
TEST(CalibrationTest, FindsTheConstantsBehindSteps) {
  constexpr double kParams = 3.0 * 2576 * 2576, kFlopsPerS = 80e9, kBytesPerS = 15e9;
  std::vector<std::vector<double>> seconds(2);
  for (const bool is_sharded : {false, true}) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      const double others = (ranks - 1.0) / ranks;
      double bytes = 12 + 28.0 / (is_sharded ? ranks : 1);  // forward and backward, and Adam
      if (ranks > 1) bytes += 4 * (3 * others + 2.0 / ranks) + 4 * (2 * others + 2.0 / ranks);  // sum, and hand out
      const double compute = 6 * kParams * 32 / kFlopsPerS * std::max(1.0, ranks / 2.0);
      seconds[is_sharded ? 1 : 0].push_back(compute + ranks * bytes * kParams / kBytesPerS);
    }
  }
  const Calibration calibration = fit(/*cores=*/2, seconds);
  for (const Fitted& fitted : calibration.strategies) {
    EXPECT_NEAR(fitted.flops_per_s, kFlopsPerS, 0.005 * kFlopsPerS) << fitted.strategy;
    EXPECT_NEAR(fitted.bytes_per_s, kBytesPerS, 0.005 * kBytesPerS) << fitted.strategy;
  }
  EXPECT_LT(calibration.largest_error(), 0.005);
  seconds[0][3] *= 1.5;
  EXPECT_GT(fit(/*cores=*/2, seconds).largest_error(), 0.3);
}

// Steps of a host on which something else ran: no speed of a core explains that two ranks take three times as long.
TEST(CalibrationTest, SaysThatConstantsAreImplausible) {
  const Calibration disturbed = check({64.9, 206.5, 66.2, 142.9});
  EXPECT_FALSE(disturbed.is_plausible());
  EXPECT_THAT(to_text(disturbed), HasSubstr("a constant is negative"));
  EXPECT_TRUE(check({72.6, 111.3, 62.5, 105.0}).is_plausible());
}

// Cores so fast that only the wire counts: in a step each of two hosts sends as many bytes as the model has, half of
// them to sum gradients, and half to hand out sums or parameters.
TEST(CalibrationTest, FindsTheWireBetweenTwoHosts) {
  constexpr double kWireBytesPerS = 125e6;
  const Calibration fast = check({1e-3, 1.1e-3, 1e-3, 1.1e-3});
  const auto wire_ms = [](double width) { return 1e3 * 3 * width * width * 4 / kWireBytesPerS; };
  const HostsCheck hosts = check_hosts(fast, {wire_ms(1152), wire_ms(1152), wire_ms(2576), wire_ms(2576)});
  EXPECT_NEAR(hosts.bytes_per_s, kWireBytesPerS, 0.01 * kWireBytesPerS);
  EXPECT_LT(hosts.largest_error(), 0.01);
  EXPECT_GT(check_hosts(fast, {wire_ms(1152), wire_ms(1152), wire_ms(2576), 2 * wire_ms(2576)}).largest_error(), 0.4);
}

TEST(CalibrationTest, NeedsFourStepsOfTwoHostsThatComputeFirst) {
  const Calibration one_host = check({63.4, 86.1, 69.4, 91.0});
  EXPECT_THAT(message_of<UsageError>([&] { check_hosts(one_host, {130, 170}); }),
              HasSubstr("--two_hosts_ms has 2 numbers; write 4"));
  EXPECT_THAT(message_of<UsageError>([&] { check_hosts(one_host, {1, 170, 700, 700}); }),
              HasSubstr("less than a rank computes"));
}

TEST(CalibrationTest, NeedsTwoRanksOfBothStrategies) {
  EXPECT_THAT(message_of<UsageError>([] { check({70, 110, 170}); }),
              HasSubstr("--steps_ms has 3 numbers; write as many"));
}

}  // namespace
}  // namespace fulgur::scaling
