#include "fulgur/distributed/collective.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <tuple>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/distributed/world_stores.h"
#include "tests/testing/errors.h"
#include "tests/testing/mapped_memory.h"
#include "tests/testing/rank_values.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::reduced;
using testing::run_ranks;
using testing::run_ranks_on_hosts;
using testing::values_of;

// The transport between ranks.
enum class Through { shared_memory, gloo, two_hosts, three_hosts };

std::string name_of(Through through) {
  const std::map<Through, std::string> names{{Through::shared_memory, "shared_memory"},
                                             {Through::gloo, "gloo"},
                                             {Through::two_hosts, "two_hosts"},
                                             {Through::three_hosts, "three_hosts"}};
  return names.at(through);
}

int64_t num_hosts(Through through) {
  if (through == Through::two_hosts) return 2;
  return through == Through::three_hosts ? 3 : 1;
}

WorldOptions over(Through through, WorldOptions options) {
  options.collectives.shared_memory = through != Through::gloo;
  return options;
}

void run_ranks_through(Through through, int64_t world_size, const WorldOptions& options,
                       const std::function<void(World&)>& body) {
  run_ranks_on_hosts(num_hosts(through), world_size / num_hosts(through), over(through, options), body);
}

WorldOptions patient() { return {.timeout_s = testing::kRanksTimeoutS, .heartbeat_interval_s = 0.1}; }
const std::chrono::duration<double> kTimeout(testing::kRanksTimeoutS);

// The timeout is short, and covers what `body` does: each rank has connected, and its thread runs.
void run_impatient_ranks(Through through, int64_t world_size, const std::function<void(World&)>& body) {
  std::latch all_are_there(world_size);
  run_ranks_through(through, world_size, {.timeout_s = 1, .heartbeat_interval_s = 0.1}, [&](World& world) {
    all_are_there.arrive_and_wait();
    body(world);
  });
}

WorldOptions little_staging() {
  WorldOptions options = patient();
  options.collectives.staging_bytes = 512;
  return options;
}

class EveryCollective : public ::testing::TestWithParam<std::tuple<int64_t, at::ScalarType, Through>> {
 protected:
  int64_t world_size() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }

  // Includes fewer elements than ranks, uneven ends and several chunks; small all_reduces, and a large one.
  void for_each_size(const std::function<void(World&, int64_t)>& body) const {
    std::vector<int64_t> sizes{1, 2, 5, 64, 1003};
    if (world_size() <= 4) sizes.push_back(20011);
    run_ranks_through(std::get<2>(GetParam()), world_size(), little_staging(), [&](World& world) {
      for (const int64_t size : sizes) body(world, size);
    });
  }
};

TEST_P(EveryCollective, AllReduceGivesTheReductionToEveryRank) {
  for_each_size([&](World& world, int64_t size) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
      const at::Tensor flat = values_of(world.rank(), size, dtype());
      world.data().all_reduce(flat, op).wait();
      EXPECT_TRUE(flat.equal(reduced(world_size(), size, dtype(), op)));
    }
  });
}

TEST_P(EveryCollective, ReduceScatterGivesEachRankItsRange) {
  for_each_size([&](World& world, int64_t size) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
      const at::Tensor flat = values_of(world.rank(), size, dtype());
      world.data().reduce_scatter(flat, op).wait();
      const ElementRange mine = rank_range(size, world.rank(), world_size());
      const at::Tensor expected = mine.of(reduced(world_size(), size, dtype(), op));
      EXPECT_TRUE(mine.of(flat).equal(expected));
      const at::Tensor into = torch::zeros({mine.size()}, dtype());
      world.data().reduce_scatter(values_of(world.rank(), size, dtype()), op, into).wait();
      EXPECT_TRUE(into.equal(expected));
    }
  });
}

TEST_P(EveryCollective, AllGatherBringsEveryRange) {
  for_each_size([&](World& world, int64_t size) {
    const at::Tensor whole = values_of(3, size, dtype());
    const at::Tensor flat = torch::zeros({size}, dtype());
    const ElementRange mine = rank_range(size, world.rank(), world_size());
    mine.of(flat).copy_(mine.of(whole));
    world.data().all_gather(flat).wait();
    EXPECT_TRUE(flat.equal(whole));
  });
}

TEST_P(EveryCollective, BroadcastGivesTheRootsValues) {
  for_each_size([&](World& world, int64_t size) {
    for (int64_t root = 0; root < world_size(); root += std::max<int64_t>(1, world_size() / 4)) {
      const at::Tensor flat = values_of(world.rank(), size, dtype());
      world.data().broadcast(flat, root).wait();
      EXPECT_TRUE(flat.equal(values_of(root, size, dtype())));
    }
  });
}

const auto kNameOfCollective = [](const auto& test) {
  return std::to_string(std::get<0>(test.param)) + "_" + c10::toString(std::get<1>(test.param)) + "_" +
         name_of(std::get<2>(test.param));
};

INSTANTIATE_TEST_SUITE_P(Ranks, EveryCollective,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                                              at::kInt, at::kLong, at::kByte, at::kBool),
                                            ::testing::Values(Through::shared_memory, Through::gloo)),
                         kNameOfCollective);

// Some ranks have no share of a chunk; with 64 ranks the outbox has room for one element of each rank.
INSTANTIATE_TEST_SUITE_P(ManyRanks, EveryCollective,
                         ::testing::Combine(::testing::Values(8, 16, 64), ::testing::Values(at::kDouble, at::kByte),
                                            ::testing::Values(Through::shared_memory)),
                         kNameOfCollective);

INSTANTIATE_TEST_SUITE_P(ManyRanksOverGloo, EveryCollective,
                         ::testing::Combine(::testing::Values(8, 11), ::testing::Values(at::kDouble),
                                            ::testing::Values(Through::gloo)),
                         kNameOfCollective);

INSTANTIATE_TEST_SUITE_P(OfTwoHosts, EveryCollective,
                         ::testing::Combine(::testing::Values(4, 8),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kLong, at::kBool),
                                            ::testing::Values(Through::two_hosts)),
                         kNameOfCollective);

INSTANTIATE_TEST_SUITE_P(OfThreeHosts, EveryCollective,
                         ::testing::Combine(::testing::Values(6), ::testing::Values(at::kDouble, at::kByte),
                                            ::testing::Values(Through::three_hosts)),
                         kNameOfCollective);

INSTANTIATE_TEST_SUITE_P(Alone, EveryCollective,
                         ::testing::Combine(::testing::Values(1), ::testing::Values(at::kFloat, at::kBool),
                                            ::testing::Values(Through::shared_memory)));

// Large tensors in memory of the group, which ranks of a host read and write in place.
class MemoryOfTheGroup : public ::testing::TestWithParam<std::tuple<int64_t, at::ScalarType, Through>> {
 protected:
  int64_t world_size() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }

  void on_ranks(const std::function<void(World&)>& body) const {
    run_ranks_through(std::get<2>(GetParam()), world_size(), patient(), body);
  }
  at::Tensor in_memory_of(World& world, const at::Tensor& values) const {
    return world.data().allocate(values.numel(), values.options()).copy_(values);
  }
  at::Tensor values_of(int64_t rank) const { return testing::values_of(rank, kSize, dtype()); }
  at::Tensor reduced(ReduceOp op) const { return testing::reduced(world_size(), kSize, dtype(), op); }
  ElementRange range_of(const World& world) const { return rank_range(kSize, world.rank(), world_size()); }

  static constexpr int64_t kSize = 300007;
};

INSTANTIATE_TEST_SUITE_P(Ranks, MemoryOfTheGroup,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                                              at::kLong, at::kByte, at::kBool),
                                            ::testing::Values(Through::shared_memory)),
                         kNameOfCollective);
INSTANTIATE_TEST_SUITE_P(Elsewhere, MemoryOfTheGroup,
                         ::testing::Values(std::tuple(2, at::kFloat, Through::gloo),
                                           std::tuple(8, at::kFloat, Through::shared_memory),
                                           std::tuple(4, at::kFloat, Through::two_hosts)),
                         kNameOfCollective);

TEST_P(MemoryOfTheGroup, IsZeroAtFirst) {
  on_ranks([&](World& world) {
    EXPECT_TRUE(world.data().allocate(kSize, dtype()).eq(0).all().item<bool>());
    EXPECT_EQ(world.data().allocate(0, dtype()).numel(), 0);
  });
}

TEST_P(MemoryOfTheGroup, AllReduceGivesTheReductionToEveryRank) {
  on_ranks([&](World& world) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
      const at::Tensor flat = in_memory_of(world, values_of(world.rank()));
      world.data().all_reduce(flat, op).wait();
      EXPECT_TRUE(flat.equal(reduced(op)));
    }
  });
}

TEST_P(MemoryOfTheGroup, ReduceScatterGivesEachRankItsRange) {
  on_ranks([&](World& world) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
      const at::Tensor flat = in_memory_of(world, values_of(world.rank()));
      const at::Tensor into = torch::zeros({range_of(world).size()}, dtype());
      world.data().reduce_scatter(flat, op, into).wait();
      EXPECT_TRUE(into.equal(range_of(world).of(reduced(op))));
      flat.copy_(values_of(world.rank()));  // nobody reads it any more
      world.data().reduce_scatter(flat, op).wait();
      EXPECT_TRUE(range_of(world).of(flat).equal(into));
    }
  });
}

TEST_P(MemoryOfTheGroup, AllGatherBringsEveryRange) {
  on_ranks([&](World& world) {
    const at::Tensor whole = values_of(3), flat = world.data().allocate(kSize, dtype());
    for (int64_t round = 0; round < 3; ++round) {
      flat.zero_();
      range_of(world).of(flat).copy_(range_of(world).of(whole));
      world.data().all_gather(flat).wait();
      EXPECT_TRUE(flat.equal(whole));
    }
  });
}

TEST_P(MemoryOfTheGroup, TensorsMayLieInItOnSomeRanksOnly) {
  on_ranks([&](World& world) {
    for (const int64_t odd_one : {int64_t{0}, world_size() - 1}) {
      const at::Tensor values = values_of(world.rank());
      const at::Tensor flat = world.rank() == odd_one ? values.clone() : in_memory_of(world, values);
      world.data().all_reduce(flat).wait();
      EXPECT_TRUE(flat.equal(reduced(ReduceOp::sum)));
    }
  });
}

// The bits of sums do not depend on it.
TEST_P(MemoryOfTheGroup, SumsHaveTheBitsOfOtherMemory) {
  on_ranks([&](World& world) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(world.rank()));
    const at::Tensor values = torch::randn({kSize}, generator).to(dtype());
    const at::Tensor elsewhere = values.clone(), flat = in_memory_of(world, values);
    const at::Tensor part = in_memory_of(world, torch::cat({values, values})).narrow(0, kSize, kSize);
    for (const at::Tensor& tensor : {elsewhere, flat, part}) world.data().all_reduce(tensor).wait();
    EXPECT_TRUE(flat.equal(elsewhere));
    EXPECT_TRUE(part.equal(elsewhere));
  });
}

// So many elements that each of three threads has work on every rank.
TEST(MemoryOfAGroup, IsReducedAndGatheredBySeveralThreads) {
  constexpr int64_t kMany = 5'000'003;
  WorldOptions options = patient();
  options.collectives.num_threads = 3;
  for (const int64_t world_size : {2, 3}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(world_size, options, [&](World& world) {
        const auto in_memory_of_group = [&](const at::Tensor& values) {
          return world.data().allocate(kMany, values.options()).copy_(values);
        };
        const ElementRange mine = rank_range(kMany, world.rank(), world_size);
        const at::Tensor sum = reduced(world_size, kMany, dtype, ReduceOp::sum);
        const at::Tensor everywhere = in_memory_of_group(values_of(world.rank(), kMany, dtype));
        world.data().all_reduce(everywhere).wait();
        EXPECT_TRUE(everywhere.equal(sum));
        const at::Tensor scattered = in_memory_of_group(values_of(world.rank(), kMany, dtype));
        world.data().reduce_scatter(scattered).wait();
        EXPECT_TRUE(mine.of(scattered).equal(mine.of(sum)));
        const at::Tensor gathered = in_memory_of_group(torch::zeros({kMany}, dtype));
        mine.of(gathered).copy_(mine.of(sum));
        world.data().all_gather(gathered).wait();
        EXPECT_TRUE(gathered.equal(sum));
      });
    }
  }
}

TEST(MemoryOfAGroup, IsMappedByEveryRankWhenItIsFirstExchanged) {
  for (const int64_t world_size : {2, 3}) {
    run_ranks(world_size, patient(), [&](World& world) {
      const at::Tensor flat = world.data().allocate(300007, at::kFloat);
      const auto mapped_by_all = [&] {
        world.control().barrier();
        const int64_t count = testing::num_mapped_regions();
        world.control().barrier();
        return count;
      };
      const int64_t before = mapped_by_all();
      for (int round = 0; round < 2; ++round) {
        world.data().all_reduce(flat).wait();
        EXPECT_EQ(mapped_by_all(), before + world_size * world_size);
      }
    });
  }
}

TEST(RankRange, CoversTheTensorInOrder) {
  for (const int64_t world_size : {1, 2, 3, 4, 7}) {
    for (const int64_t size : {0, 1, 2, 5, 64, 1003}) {
      int64_t end = 0;
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const ElementRange range = rank_range(size, rank, world_size);
        EXPECT_EQ(range.begin, end);
        end = range.end;
      }
      EXPECT_EQ(end, size);
    }
  }
}

class RankOrder : public ::testing::TestWithParam<std::tuple<int64_t, Through>> {};

std::vector<at::Tensor> noise(int64_t world_size, at::ScalarType dtype) {
  torch::manual_seed(1);
  std::vector<at::Tensor> values;
  for (int64_t rank = 0; rank < world_size; ++rank) values.push_back(torch::randn({20011}).to(dtype));
  return values;
}

TEST_P(RankOrder, SumsHaveTheBitsOfAddingOneRankAfterAnotherThenOneHostAfterAnother) {
  const auto [world_size, through] = GetParam();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::vector<at::Tensor> values = noise(world_size, dtype);
    at::Tensor expected;
    const size_t ranks_per_host = values.size() / static_cast<size_t>(num_hosts(through));
    for (size_t first = 0; first < values.size(); first += ranks_per_host) {
      at::Tensor of_host =
          values[first].to(at::promote_types(dtype, at::kFloat), /*non_blocking=*/false, /*copy=*/true);
      for (size_t rank = first + 1; rank < first + ranks_per_host; ++rank) of_host += values[rank];
      of_host = of_host.to(dtype).to(of_host.scalar_type());
      expected = expected.defined() ? expected + of_host : of_host;
    }
    expected = expected.to(dtype);
    WorldOptions options = little_staging();
    options.collectives.rank_order_all_reduce = through == Through::gloo;
    run_ranks_through(through, world_size, options, [&](World& world) {
      const at::Tensor scattered = values[static_cast<size_t>(world.rank())].clone();
      world.data().reduce_scatter(scattered).wait();
      const ElementRange mine = rank_range(20011, world.rank(), world.world_size());
      EXPECT_TRUE(mine.of(scattered).equal(mine.of(expected)));
      const at::Tensor all = values[static_cast<size_t>(world.rank())].clone();
      world.data().all_reduce(all).wait();
      EXPECT_TRUE(all.equal(expected));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RankOrder,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values(Through::shared_memory, Through::gloo)));
INSTANTIATE_TEST_SUITE_P(RanksOfHosts, RankOrder,
                         ::testing::Values(std::tuple(4, Through::two_hosts), std::tuple(6, Through::two_hosts),
                                           std::tuple(6, Through::three_hosts)));

TEST(AllReduceInRankOrder, HasTheBitsOfAReduceScatterOverEveryTransport) {
  for (const Through through : {Through::shared_memory, Through::gloo}) {
    const std::vector<at::Tensor> values = noise(3, at::kFloat);
    run_ranks_through(through, 3, little_staging(), [&](World& world) {
      const at::Tensor all = values[static_cast<size_t>(world.rank())].clone(), in_parts = all.clone();
      all_reduce_in_rank_order(world.data(), all).wait();
      world.data().reduce_scatter(in_parts).wait();
      world.data().all_gather(in_parts).wait();
      EXPECT_TRUE(all.equal(in_parts)) << name_of(through);
      EXPECT_EQ(world.data().adds_in_rank_order(), through == Through::shared_memory);
    });
  }
}

// How ranks wait for each other, find each other and fail.
class Collectives : public ::testing::TestWithParam<Through> {};

INSTANTIATE_TEST_SUITE_P(Over, Collectives, ::testing::Values(Through::shared_memory, Through::gloo),
                         [](const auto& param) { return name_of(param.param); });

class InFlight : public ::testing::TestWithParam<std::tuple<int64_t, Through>> {
 protected:
  int64_t world_size() const { return std::get<0>(GetParam()); }
  void on_ranks(const std::function<void(World&)>& body) const {
    run_ranks_through(std::get<1>(GetParam()), world_size(), patient(), body);
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, InFlight,
                         ::testing::Values(std::tuple(3, Through::shared_memory), std::tuple(3, Through::gloo),
                                           std::tuple(9, Through::gloo), std::tuple(4, Through::two_hosts)),
                         [](const auto& test) {
                           return name_of(std::get<1>(test.param)) + "_" + std::to_string(std::get<0>(test.param));
                         });

TEST_P(InFlight, ManyAreWaitedForInAnyOrder) {
  on_ranks([this](World& world) {
    const int64_t n = world_size();
    std::vector<at::Tensor> buckets;
    std::vector<Work> works;
    for (int64_t i = 0; i < 6; ++i) {
      buckets.push_back(torch::full({300000 + i}, world.rank() + 1.0));
      works.push_back(i % 3 == 0 ? world.data().all_reduce(buckets.back())
                                 : world.data().reduce_scatter(buckets.back()));
    }
    world.control().barrier();  // does not wait for the pending collectives
    for (size_t i = 0; i < 6; ++i) works[world.rank() % 2 == 0 ? i : 5 - i].wait();
    for (size_t i = 0; i < 6; ++i) {
      const ElementRange whole{0, buckets[i].numel()};
      const ElementRange got = i % 3 == 0 ? whole : rank_range(whole.end, world.rank(), n);
      EXPECT_TRUE(got.of(buckets[i]).eq(static_cast<double>(n * (n + 1) / 2)).all().item<bool>());
    }
  });
}

// More collectives than are kept at a time, some finished on another thread than the one that starts them.
TEST_P(InFlight, ManySmallOnesAreWaitedForInAnyOrder) {
  on_ranks([this](World& world) {
    const int64_t n = world_size();
    std::vector<at::Tensor> sums;
    std::vector<Work> works;
    for (int64_t i = 0; i < 40; ++i) {
      sums.push_back(torch::full({i + 1}, world.rank() + i));
      works.push_back(world.control().all_reduce(sums.back()));
      if (i % 7 == 3) std::thread([&] { works.back().wait(); }).join();
      if (i % 11 == 5) world.control().barrier();
    }
    for (size_t i = 0; i < 40; ++i) works[world.rank() % 2 == 0 ? i : 39 - i].wait();
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_TRUE(sums[static_cast<size_t>(i)].eq(n * (n - 1) / 2 + n * i).all().item<bool>());
    }
  });
}

// Half of the ranks wait for the second small one while the others wait for the large one before it.
TEST_P(InFlight, LargeOnesAmongSmallOnesAreWaitedForInAnyOrder) {
  on_ranks([this](World& world) {
    const int64_t n = world_size();
    for (int64_t repeat = 0; repeat < 5; ++repeat) {
      std::vector<at::Tensor> sums;
      std::vector<Work> works;
      for (const int64_t size : {10, 300000, 10}) {
        sums.push_back(torch::full({size}, world.rank() + 1.0));
        works.push_back(world.data().all_reduce(sums.back()));
      }
      const bool waits_for_small = world.rank() < n / 2;
      for (const size_t i : waits_for_small ? std::array<size_t, 3>{2, 1, 0} : std::array<size_t, 3>{1, 2, 0})
        works[i].wait();
      for (const at::Tensor& sum : sums) EXPECT_TRUE(sum.eq(static_cast<double>(n * (n + 1) / 2)).all().item<bool>());
    }
  });
}

// Twenty small all_reduces, more than are kept at a time.
class SmallOnes {
 public:
  explicit SmallOnes(World& world) : world_(world) {}
  void start() {
    for (int64_t i = 0; i < 20; ++i) {
      sums_.push_back(torch::full({i + 1}, world_.rank() + i));
      works_.push_back(world_.data().all_reduce(sums_.back()));
    }
  }
  void wait() {
    for (Work& work : works_) work.wait();
    for (int64_t i = 0; i < 20; ++i) EXPECT_TRUE(sums_[static_cast<size_t>(i)].eq(1 + 2 * i).all().item<bool>());
  }

 private:
  World& world_;
  std::vector<at::Tensor> sums_;
  std::vector<Work> works_;
};

// Rank 0 starts all of its collectives before the barrier, rank 1 starts its own after it.
TEST_P(Collectives, StartingManySmallOnesWaitsForNobody) {
  run_ranks(2, over(GetParam(), patient()), [](World& world) {
    SmallOnes ones(world);
    if (world.rank() == 0) ones.start();
    world.control().barrier();
    if (world.rank() == 1) ones.start();
    ones.wait();
  });
}

// Rank 1 waits for all of them while rank 0 is in the barrier: rank 0's part proceeds without a thread that waits for
// it.
TEST_P(Collectives, SmallOnesThatAreStartedGoOn) {
  run_ranks(2, over(GetParam(), patient()), [](World& world) {
    SmallOnes ones(world);
    ones.start();
    if (world.rank() == 0) world.control().barrier();
    ones.wait();
    if (world.rank() == 1) world.control().barrier();
  });
}

TEST_P(Collectives, GroupsOfOneRankGetTheirOwn) {
  run_ranks(2, over(GetParam(), patient()), [](World& world) {
    const auto alone = world.data().sub_group({1});
    ASSERT_EQ(alone != nullptr, world.rank() == 1);
    if (alone == nullptr) return;
    const at::Tensor into = torch::zeros({5}), values = torch::arange(5.0);
    alone->all_reduce(values).wait();
    alone->reduce_scatter(values, ReduceOp::sum, into).wait();
    EXPECT_TRUE(into.equal(torch::arange(5.0)));
    alone->all_gather(values).wait();
    alone->broadcast(values, 0).wait();
    alone->barrier();
    EXPECT_TRUE(values.equal(torch::arange(5.0)));
  });
}

TEST_P(Collectives, SubGroupsExchangeAmongThemselves) {
  run_ranks(4, over(GetParam(), patient()), [](World& world) {
    const auto even = world.data().sub_group({0, 2});
    const auto odd = world.data().sub_group({3, 1});
    ASSERT_EQ(even != nullptr, world.rank() % 2 == 0);
    ASSERT_EQ(odd != nullptr, world.rank() % 2 == 1);
    Collective& mine = even ? *even : *odd;
    EXPECT_EQ(mine.world_size(), 2);
    EXPECT_EQ(mine.rank(), world.rank() == 2 || world.rank() == 1 ? 1 : 0);
    const at::Tensor sum = torch::full({5}, world.rank());
    mine.all_reduce(sum).wait();
    EXPECT_TRUE(sum.eq(even ? 2 : 4).all().item<bool>());
    const at::Tensor first = torch::full({1}, world.rank());
    mine.broadcast(first, 0).wait();
    EXPECT_EQ(first.item<int64_t>(), even ? 0 : 3);
    world.control().barrier();
  });
}

class Duplicate : public ::testing::TestWithParam<std::tuple<int64_t, Through>> {};

INSTANTIATE_TEST_SUITE_P(Ranks, Duplicate,
                         ::testing::Combine(::testing::Values(2, 3),
                                            ::testing::Values(Through::shared_memory, Through::gloo)),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) + "_" + name_of(std::get<1>(param.param));
                         });

// Rank 0 calls the two groups in one order, the others in the opposite order, with tensors of unequal sizes: a message
// that met a call of the other group would be an error, or a wrong sum.
TEST_P(Duplicate, IsAGroupOfItsOwnOfTheSameRanks) {
  const auto [world_size, through] = GetParam();
  run_ranks(world_size, over(through, patient()), [&](World& world) {
    const auto twin = world.data().duplicate();
    EXPECT_EQ(twin->rank(), world.data().rank());
    EXPECT_EQ(twin->world_size(), world.data().world_size());
    for (const int64_t size : {3, 100000}) {  // small ones are sent in another way
      const at::Tensor sum = torch::full({size}, world.rank() + 1), twins = torch::full({size + 1}, world.rank() + 10);
      std::vector<Work> works;
      if (world.rank() == 0) works.push_back(world.data().all_reduce(sum));
      works.push_back(twin->all_reduce(twins));
      if (world.rank() > 0) works.push_back(world.data().all_reduce(sum));
      for (Work& work : works) work.wait();
      const int64_t below = world.world_size() * (world.world_size() - 1) / 2;
      EXPECT_TRUE(sum.eq(below + world.world_size()).all().item<bool>());
      EXPECT_TRUE(twins.eq(below + 10 * world.world_size()).all().item<bool>());
    }
    twin->barrier();
    world.control().barrier();
  });
}

TEST_P(Duplicate, AbortedTheOriginalStillWorks) {
  const auto [world_size, through] = GetParam();
  run_ranks(world_size, over(through, patient()), [&](World& world) {
    const auto twin = world.data().duplicate();
    world.control().barrier();
    twin->abort("not needed any more");
    EXPECT_EQ(message_of<DistributedError>([&] { twin->barrier(); }), "not needed any more");
    const at::Tensor ones = torch::ones({100000});
    world.data().all_reduce(ones).wait();
    EXPECT_TRUE(ones.eq(world.world_size()).all().item<bool>());
    world.control().barrier();
  });
}

TEST_P(Duplicate, IsAbortedWithTheOriginal) {
  const auto [world_size, through] = GetParam();
  run_ranks(world_size, over(through, patient()), [&](World& world) {
    const auto twin = world.data().duplicate();
    const auto twin_of_twin = twin->duplicate();
    world.control().barrier();
    world.data().abort("all of them");
    EXPECT_EQ(message_of<DistributedError>([&] { twin_of_twin->barrier(); }), "all of them");
    world.control().barrier();
  });
}

TEST(Collective, DuplicatesAWorldOfOne) {
  World world;
  EXPECT_EQ(world.data().duplicate()->world_size(), 1);
}

TEST(Collective, RefusesWhatItCannotSend) {
  for (const int64_t world_size : {1, 2}) {
    run_ranks(world_size, [](World& world) {
      const auto refusal = [&](const at::Tensor& tensor) {
        return message_of<c10::ValueError>([&] { world.data().all_reduce(tensor).wait(); });
      };
      EXPECT_THAT(refusal(torch::zeros({4, 4})), HasSubstr("pass tensor.view({-1})"));
      EXPECT_THAT(refusal(torch::zeros({8}).slice(0, 0, 8, 2)), HasSubstr("contiguous"));
      EXPECT_THAT(refusal(torch::zeros({4}, at::kComplexFloat)), HasSubstr("does not take ComplexFloat"));
      EXPECT_THAT(message_of<c10::ValueError>(
                      [&] { world.data().reduce_scatter(torch::zeros({4}), ReduceOp::sum, torch::zeros({9})).wait(); }),
                  HasSubstr("into 9 elements of Float on cpu, but this rank's range has"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { world.data().broadcast(torch::zeros({4}), 7).wait(); }),
                  HasSubstr("broadcast from rank 7"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { world.data().sub_group({0, 0}); }), HasSubstr("twice"));
    });
  }
}

// A tensor on another device stands for one on a GPU, whose address the control group would read as host memory.
TEST(Collective, RefusesATensorOnAnotherDevice) {
  run_ranks(2, [](World& world) {
    const at::Tensor meta = torch::zeros({4}, torch::device(at::kMeta));
    const auto refusal = [](const std::function<void()>& call) { return message_of<c10::ValueError>(call); };
    const std::string expected = "group 'control' takes tensors on cpu; got one on meta; pass tensor.to(\"cpu\")";
    Collective& group = world.control();
    EXPECT_THAT(refusal([&] { group.all_reduce(meta).wait(); }), HasSubstr(expected));
    EXPECT_THAT(refusal([&] { group.reduce_scatter(meta).wait(); }), HasSubstr(expected));
    EXPECT_THAT(refusal([&] { group.all_gather(meta).wait(); }), HasSubstr(expected));
    EXPECT_THAT(refusal([&] { group.broadcast(meta, 0).wait(); }), HasSubstr(expected));
    const at::Tensor into = torch::zeros({2}, torch::device(at::kMeta));
    EXPECT_THAT(refusal([&] { group.reduce_scatter(torch::zeros({4}), ReduceOp::sum, into).wait(); }),
                HasSubstr("on meta, but this rank's range has"));
  });
}

// Rank 1 has joined, but ends before it connects.
TEST_P(Collectives, ARankThatDoesNotConnectIsWaitedForAsLongAsForOneThatDoesNotCome) {
  WorldOptions options = over(GetParam(), patient());
  options.connect_timeout_s = 1;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(message_of<DistributedError>(
                  [&] { World(WorldStores(store), 0, 2, std::nullopt, {.interface = "lo", .address = {}}, options); }),
              HasSubstr("rank 0: connecting (collective 0 of group 'data', timeout 1 s) failed"));
}

class Timeout : public ::testing::TestWithParam<std::tuple<const char*, Through>> {
 protected:
  static void call(Collective& group) {
    const at::Tensor flat = torch::ones({100000});
    const std::string name = std::get<0>(GetParam());
    if (name == "all_reduce") group.all_reduce(flat).wait();
    if (name == "reduce_scatter") group.reduce_scatter(flat).wait();
    if (name == "all_gather") group.all_gather(flat).wait();
    if (name == "broadcast") group.broadcast(flat, 2).wait();
    if (name == "barrier") group.barrier();
  }
};

TEST_P(Timeout, NamesTheRankThatIsMissingAndWhereItIs) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const int64_t world_size = num_hosts(std::get<1>(GetParam())) == 2 ? 4 : 3;
  std::latch others_failed(world_size - 1);
  const auto body = [&](World& world) {
    world.set_step(12);
    world.data().barrier();
    if (world.rank() == 2) return others_failed.wait();
    try {
      call(world.data());
    } catch (const DistributedError& error) {
      others_failed.count_down();
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
      EXPECT_EQ(error.failed_rank, 2);
      throw;
    }
  };
  EXPECT_THROW(run_impatient_ranks(std::get<1>(GetParam()), world_size, body), DistributedError);
  ASSERT_EQ(std::ssize(messages), world_size - 1);
  for (const std::string& message : messages) {
    EXPECT_THAT(message, HasSubstr("rank 2 is missing: alive, but still at step 12, in collective 1 of group 'data'"));
    EXPECT_THAT(message, HasSubstr("collective 2 of group 'data', timeout 1 s"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, Timeout,
    ::testing::Combine(::testing::Values("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
                       ::testing::Values(Through::shared_memory, Through::gloo, Through::two_hosts)),
    [](const auto& param) { return std::string(std::get<0>(param.param)) + "_" + name_of(std::get<1>(param.param)); });

TEST_P(Collectives, RanksThatMakeDifferentCallsAreToldWhich) {
  std::atomic<int> num_failed = 0;
  const auto body = [&](World& world) {
    world.set_step(3);
    const std::string message = message_of<DistributedError>([&] {
      if (world.rank() == 0) world.data().barrier();
      if (world.rank() == 1) world.data().all_reduce(torch::ones({4})).wait();
    });
    EXPECT_THAT(message, HasSubstr("rank 0 is at step 3, in collective 1 of group 'data' (barrier), but rank 1 is at "
                                   "step 3, in collective 1 of group 'data' (all_reduce): is there a call that"));
    ++num_failed;
    throw std::runtime_error("over");
  };
  EXPECT_THROW(run_impatient_ranks(GetParam(), 2, body), std::runtime_error);
  EXPECT_EQ(num_failed, 2);
}

TEST(SharedMemory, SaysWhichSizesDiffer) {
  const auto body = [&](World& world) {
    const int64_t size = 4 + world.rank();
    const std::string message =
        message_of<DistributedError>([&] { world.data().all_reduce(torch::ones({size})).wait(); });
    if (world.rank() == 0) {
      EXPECT_THAT(message, HasSubstr("rank 1 calls all_reduce of 20 bytes, and this one all_reduce of 16 bytes"));
    }
    throw std::runtime_error("over");
  };
  EXPECT_THROW(run_impatient_ranks(Through::shared_memory, 2, body), std::runtime_error);
}

TEST_P(Collectives, ARankAtTheEndOfItsProgramIsNamed) {
  const auto body = [&](World& world) {
    const std::string message = message_of<DistributedError>([&] {
      if (world.rank() == 0) world.leave();
      if (world.rank() == 1) world.control().all_reduce(torch::ones({1})).wait();
    });
    EXPECT_THAT(message, HasSubstr("rank 0 is at the end of the program, but rank 1 is at step 0, in"));
    throw std::runtime_error("over");
  };
  EXPECT_THROW(run_impatient_ranks(GetParam(), 2, body), std::runtime_error);
}

TEST_P(InFlight, ARankThatThrowsStopsTheOthersWithItsReason) {
  for (const bool scatters : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    const auto body = [&](World& world) {
      world.set_step(7);
      world.data().barrier();
      if (world.rank() == 1) throw std::runtime_error("boom");
      const at::Tensor flat = torch::ones({100000});
      Work work = scatters ? world.data().reduce_scatter(flat) : world.data().all_reduce(flat);
      for (int again = 0; again < 2; ++again) {
        const std::string message = message_of<DistributedError>([&] { work.wait(); });
        EXPECT_THAT(message, HasSubstr("rank 1 failed at step 7: boom"));
      }
      EXPECT_THAT(message_of<DistributedError>([&] { world.data().all_reduce(flat).wait(); }), HasSubstr("boom"));
    };
    EXPECT_EQ(message_of<std::runtime_error>([&] { on_ranks(body); }), "boom");
    EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout);
  }
}

TEST_P(Collectives, ARankThatThrowsWhileOthersConnectAGroupIsHeardLongBeforeTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  const auto body = [](World& world) {
    world.set_step(7);
    if (world.rank() == 1) throw std::runtime_error("boom");
    EXPECT_THAT(message_of<DistributedError>([&] { world.data().sub_group({0, 1}); }),
                HasSubstr("rank 1 failed at step 7: boom"));
  };
  EXPECT_EQ(message_of<std::runtime_error>([&] { run_ranks(2, over(GetParam(), patient()), body); }), "boom");
  EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout);
}

TEST_P(Collectives, ARankThatDoesNotConnectAGroupIsNamed) {
  std::latch has_failed(1);
  const auto body = [&](World& world) {
    if (world.rank() == 1) return has_failed.wait();
    EXPECT_THAT(
        message_of<DistributedError>([&] { world.data().sub_group({0, 1}); }),
        HasSubstr("rank 0 is at step 0, connecting group 'data.1', but rank 1 is at step 0, before connecting group "
                  "'data.1': is there a call that not every rank makes"));
    has_failed.count_down();
    throw std::runtime_error("over");  // both ranks have heard of the failure, or will: they cannot go on
  };
  EXPECT_THROW(run_impatient_ranks(GetParam(), 2, body), std::runtime_error);
}

// A store that loses the heartbeats of rank 1, as if its host had vanished, or that no longer answers.
class FailingStore final : public c10d::HashStore {
 public:
  std::atomic<bool> loses_rank_1 = false, hangs = false;

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    hangs.wait(true);
    if (!loses_rank_1 || key != "heartbeat/1") HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    hangs.wait(true);
    return HashStore::check(keys);
  }
};

// Returns the error of rank 0, which waits in vain for rank 1 in the data group or in a group made from it, when the
// store fails.
std::string heard_when(Through through, std::atomic<bool> FailingStore::* failure, bool in_sub_group = false) {
  const auto store = c10::make_intrusive<FailingStore>();
  std::latch both_are_there(2), is_over(1);
  std::string heard;
  const auto run_rank = [&](int64_t rank) {
    WorldOptions options = over(through, patient());
    options.heartbeat_interval_s = 0.02;
    options.heartbeat_timeout_s = 3;
    World world(WorldStores(store), rank, 2, std::nullopt, {.interface = "lo", .address = {}}, options);
    const auto sub_group = in_sub_group ? world.data().sub_group({0, 1}) : nullptr;
    both_are_there.arrive_and_wait();
    if (rank == 1) return is_over.wait();
    (*store).*failure = true;
    heard = message_of<DistributedError>([&] { (sub_group ? *sub_group : world.data()).barrier(); });
    (*store).*failure = false;
    ((*store).*failure).notify_all();
    is_over.count_down();
  };
  std::thread other(run_rank, 1);
  run_rank(0);
  other.join();
  return heard;
}

TEST_P(Collectives, ARankWhoseHostVanishesIsNamedLongBeforeTheTimeout) {
  const std::string heard = heard_when(GetParam(), &FailingStore::loses_rank_1);
  EXPECT_THAT(heard, HasSubstr("rank 1 gives no sign of life (its host has gone, or it hangs); last seen at step 0"));
  EXPECT_THAT(heard, Not(ContainsRegex("timed out|waiting 20000ms")));
}

TEST_P(Collectives, ARankWhoseHostVanishesIsNamedInAGroupOfAGroup) {
  const std::string heard = heard_when(GetParam(), &FailingStore::loses_rank_1, /*in_sub_group=*/true);
  EXPECT_THAT(heard, HasSubstr("rank 1 gives no sign of life (its host has gone, or it hangs); last seen at step 0"));
  EXPECT_THAT(heard, Not(ContainsRegex("timed out|waiting 20000ms")));
}

TEST_P(Collectives, AStoreWhoseHostVanishesEndsTheRunLongBeforeTheTimeout) {
  const std::string heard = heard_when(GetParam(), &FailingStore::hangs);
  EXPECT_THAT(heard, HasSubstr("the store that the launcher keeps does not answer"));
  EXPECT_THAT(heard, Not(ContainsRegex("timed out|waiting 20000ms")));
}

TEST_P(Collectives, ARankThatThrowsDoesNotWaitForItsOwnPendingWork) {
  const auto start = std::chrono::steady_clock::now();
  const auto body = [](World& world) {
    if (world.rank() == 0) world.control().barrier();  // keeps rank 0 from joining the collectives
    const at::Tensor flat = torch::ones({100000});
    std::vector<Work> pending;
    pending.push_back(world.data().all_reduce(flat));
    pending.push_back(world.data().reduce_scatter(flat.clone()));
    throw std::runtime_error("boom");
  };
  EXPECT_EQ(message_of<std::runtime_error>([&] { run_ranks(2, over(GetParam(), patient()), body); }), "boom");
  EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout);
}

}  // namespace
}  // namespace fulgur
