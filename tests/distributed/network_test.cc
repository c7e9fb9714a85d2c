#include "fulgur/distributed/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <memory>

namespace fulgur {
namespace {

using ::testing::AnyOf;
using ::testing::Not;
using ::testing::StartsWith;

const auto kIsLoopback = AnyOf(StartsWith("127."), "::1");

bool has_more_than_the_loopback() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_RUNNING) != 0 && (entry->ifa_flags & IFF_LOOPBACK) == 0) return true;
  }
  return false;
}

TEST(Network, IsTheLoopbackOnOneHost) {
  EXPECT_THAT(choose_network({}, "localhost", 29500, /*several_hosts=*/false).address, kIsLoopback);
}

TEST(Network, IsTheLoopbackForSeveralLaunchersOnOneHost) {
  EXPECT_EQ(choose_network({}, "127.0.0.1", 29500, /*several_hosts=*/true).address, "127.0.0.1");
}

TEST(Network, IsNotTheLoopbackWhereAHostKnowsItsOwnNameAsThat) {
  if (!has_more_than_the_loopback()) GTEST_SKIP() << "this host has no network interface but the loopback";
  EXPECT_THAT(choose_network({}, "localhost", 29500, /*several_hosts=*/true).address, Not(kIsLoopback));
}

TEST(Network, OnlyANameMayBecomeKnown) {
  EXPECT_TRUE(may_be_known_later("no-such-host.invalid"));
  EXPECT_FALSE(may_be_known_later("localhost"));
  EXPECT_FALSE(may_be_known_later("127.0.0.1"));
}

}  // namespace
}  // namespace fulgur
