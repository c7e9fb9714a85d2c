#include "fulgur/distributed/transports.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/distributed/gloo_transport.h"
#include "fulgur/distributed/hierarchical_transport.h"
#include "fulgur/distributed/nccl_transport.h"
#include "fulgur/distributed/shared_memory_transport.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;

GroupConfig group_on(c10::DeviceType device) {
  return {.name = "test", .store = nullptr, .ranks = {0}, .timeout = std::chrono::seconds(20), .device = device};
}

// Stands for a transport, which is told from others by its name.
class Backend final : public c10d::Backend {
 public:
  explicit Backend(std::string name) : c10d::Backend(/*rank=*/0, /*size=*/1), name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }

 private:
  const std::string name_;
};

ConnectTransport works_as(const std::string& name) {
  return [name](const GroupConfig&) { return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Backend>(name)); };
}

TEST(Transports, TheFirstThatAppliesConnects) {
  const ConnectTransport does_not_apply = [](const GroupConfig&) { return Connection(); };
  const Connection connection = connect(group_on(c10::kMeta), {does_not_apply, works_as("first"), works_as("second")});
  EXPECT_EQ(connection.device->getBackendName(), "first");
  EXPECT_EQ(connection.host, nullptr);
}

TEST(Transports, WithoutOneThatAppliesTheErrorNamesTheDevice) {
  EXPECT_THAT(message_of<UsageError>([] { connect(group_on(c10::kMeta), transports()); }),
              HasSubstr("cannot exchange tensors on meta"));
}

// Without a store, so that a transport which is not asked for must not connect.
TEST(Transports, OneThatIsAskedForIsUsedOrRefused) {
  GroupConfig group = group_on(c10::kCPU);
  group.transport.kind = TransportKind::mpi;
  EXPECT_THAT(message_of<UsageError>([&] { connect(group, transports()); }),
              HasSubstr("strategy.transport = 'mpi', but this program was built without it; add"));
  group.transport.kind = TransportKind::gloo;
  EXPECT_EQ(connect_shared_memory(group), nullptr);
  EXPECT_EQ(connect_hierarchy(group), nullptr);
  group.transport.kind = TransportKind::shared_memory;
  EXPECT_EQ(connect_hierarchy(group), nullptr);
  EXPECT_EQ(connect_gloo(group), nullptr);
}

TEST(Transports, OneThatWasAddedIsTriedLast) {
  add_transport(works_as("added"));
  EXPECT_EQ(connect(group_on(c10::kMeta), transports()).device->getBackendName(), "added");
}

// A group without a store: a transport that did not look at the device first would crash.
TEST(Transports, ThoseOfAnotherDeviceDoNotApply) {
  EXPECT_EQ(connect_shared_memory(group_on(c10::kCUDA)), nullptr);
  EXPECT_EQ(connect_gloo(group_on(c10::kCUDA)), nullptr);
  EXPECT_FALSE(connect_nccl(group_on(c10::kCPU)).defined());
}

enum class Kind { shared_memory, hierarchy, gloo, none };

Kind kind_of(const Connection& connection) {
  if (dynamic_cast<SharedMemoryTransport*>(connection.host.get()) != nullptr) return Kind::shared_memory;
  if (dynamic_cast<HierarchicalTransport*>(connection.host.get()) != nullptr) return Kind::hierarchy;
  return dynamic_cast<GlooTransport*>(connection.host.get()) != nullptr ? Kind::gloo : Kind::none;
}

// Calls `body` in a thread for each rank, on the named host, of which each may share its memory or not.
void on_ranks(const std::vector<bool>& may_share_memory, std::vector<std::string> hosts,
              const std::function<void(GroupConfig)>& body) {
  hosts.resize(may_share_memory.size());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < may_share_memory.size(); ++rank) {
    GroupConfig group = group_on(c10::kCPU);
    group.store = store;
    group.ranks.resize(may_share_memory.size());
    for (size_t i = 0; i < group.ranks.size(); ++i) group.ranks[i] = static_cast<int64_t>(i);
    group.rank = static_cast<int64_t>(rank);
    group.network.interface = "lo";
    group.transport.shared_memory = may_share_memory[rank];
    group.transport.host_id = hosts[rank];
    threads.emplace_back(body, std::move(group));
  }
  for (std::thread& thread : threads) thread.join();
}

// How ranks connect, which then add their numbers.
std::vector<Kind> kinds_where(const std::vector<bool>& may_share_memory, const std::vector<std::string>& hosts = {}) {
  std::vector<Connection> connections(may_share_memory.size());  // destroyed when all ranks have ended
  std::vector<Kind> kinds(may_share_memory.size());
  on_ranks(may_share_memory, hosts, [&](const GroupConfig& group) {
    const auto rank = static_cast<size_t>(group.rank);
    connections[rank] = connect(group, transports());
    kinds[rank] = kind_of(connections[rank]);
    const at::Tensor sum = at::full({5}, group.rank, at::kLong);
    connections[rank].host->all_reduce(sum, ReduceOp::sum);
    EXPECT_EQ(sum[0].item<int64_t>(), group.world_size() * (group.world_size() - 1) / 2);
    connections[rank].host->barrier();
  });
  return kinds;
}

// What ranks are told that are to share memory.
std::vector<std::string> refusals_where(const std::vector<bool>& may_share_memory,
                                        const std::vector<std::string>& hosts = {}) {
  std::vector<std::string> messages(may_share_memory.size());
  on_ranks(may_share_memory, hosts, [&](GroupConfig group) {
    group.transport.kind = TransportKind::shared_memory;
    messages[static_cast<size_t>(group.rank)] = message_of<UsageError>([&] { connect(group, transports()); });
  });
  return messages;
}

TEST(Transports, EveryRankIsToldWhichOnesCannotShareMemoryAndWhy) {
  EXPECT_THAT(refusals_where({true, false, true}),
              Each("strategy.transport = 'shared_memory', but rank 1 cannot: shared memory is turned off "
                   "(FULGUR_SHARED_MEMORY=0)"));
  EXPECT_THAT(refusals_where({false, true}), Each(HasSubstr("but rank 0 cannot: shared memory is turned off")));
  EXPECT_THAT(refusals_where({true, true, true}, {"a", "b", "b"}),
              Each("strategy.transport = 'shared_memory', but ranks 1, 2 cannot: on another host than rank 0"));
  EXPECT_THAT(refusals_where({true, true, false}, {"a", "b", "a"}),
              Each(AllOf(HasSubstr("rank 1 cannot: on another host than rank 0"),
                         HasSubstr("rank 2 cannot: shared memory is turned off"))));
}

TEST(Transports, RanksOfOneHostShareMemoryUnlessOneOfThemMayNot) {
  EXPECT_THAT(kinds_where({true, true}), Each(Kind::shared_memory));
  EXPECT_THAT(kinds_where({false, false}), Each(Kind::gloo));
  EXPECT_THAT(kinds_where({true, false, true}), Each(Kind::gloo));
}

TEST(Transports, RanksOfSeveralHostsShareMemoryWithinEachUnlessOneOfThemMayNot) {
  EXPECT_THAT(kinds_where({true, true, true, true}, {"a", "a", "b", "b"}), Each(Kind::hierarchy));
  EXPECT_THAT(kinds_where({true, true, true, false}, {"a", "a", "b", "b"}), Each(Kind::gloo));
  EXPECT_THAT(kinds_where({true, true, true}, {"a", "a", "b"}), Each(Kind::gloo));
  EXPECT_THAT(kinds_where({true, true}, {"a", "b"}), Each(Kind::gloo));
}

TEST(Transports, RanksOfAHostFollowOneAnotherAndHostsHaveAsMany) {
  EXPECT_EQ(ranks_per_host({"a", "a", "b", "b"}), 2);
  EXPECT_EQ(ranks_per_host({"a", "a", "a", "b", "b", "b", "c", "c", "c"}), 3);
  for (const std::vector<std::string>& hosts : std::vector<std::vector<std::string>>{{"a", "a"},
                                                                                     {"a", "b"},
                                                                                     {"a", "a", "b"},
                                                                                     {"a", "b", "a", "b"},
                                                                                     {"a", "a", "b", "c"},
                                                                                     {"a", "a", "b", "b", "a", "a"}}) {
    EXPECT_EQ(ranks_per_host(hosts), std::nullopt);
  }
}

}  // namespace
}  // namespace fulgur
