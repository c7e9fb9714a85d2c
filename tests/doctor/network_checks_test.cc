#include "fulgur/doctor/network_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "fulgur/distributed/network.h"

namespace fulgur::doctor {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

Check of(const std::string& topic, const Checks& checks) {
  for (const Check& check : checks) {
    if (check.topic == topic) return check;
  }
  return {};
}

TEST(NetworkChecks, AHostWithoutInterfacesIsSaidToHaveNone) {
  const Check check = of("interfaces", check_network({}, {}));
  EXPECT_EQ(check.found, "none");
  EXPECT_EQ(check.verdict, Verdict::warning);
  EXPECT_THAT(of("interfaces", check_network({"lo"}, {})).found, HasSubstr("lo alone"));
}

TEST(NetworkChecks, AnInterfaceThatIsNamedMustExist) {
  EXPECT_EQ(of("interfaces", check_network({"lo", "eth0"}, {{"GLOO_SOCKET_IFNAME", "eth0"}})).verdict, Verdict::good);
  const Check check = of("interfaces", check_network({"lo", "eth0"}, {{"FULGUR_SOCKET_IFNAME", "eth1"}}));
  EXPECT_EQ(check.verdict, Verdict::problem);
  EXPECT_EQ(check.found, "lo, eth0; FULGUR_SOCKET_IFNAME=eth1");
}

TEST(NetworkChecks, WithoutALauncherThereIsNoMaster) {
  EXPECT_THAT(check_network({"lo"}, {}),
              ElementsAre(Field(&Check::topic, "interfaces"), Field(&Check::topic, "launcher")));
}

TEST(NetworkChecks, VariablesThatContradictEachOtherAreAProblem) {
  const Check check = of("launcher", check_network({"lo"}, {{"RANK", "3"},
                                                            {"WORLD_SIZE", "2"},
                                                            {"LOCAL_RANK", "0"},
                                                            {"MASTER_ADDR", "127.0.0.1"},
                                                            {"MASTER_PORT", "1"}}));
  EXPECT_EQ(check.verdict, Verdict::problem);
  EXPECT_THAT(check.found, HasSubstr("RANK"));
}

TEST(NetworkChecks, AMasterThatListensIsGood) {
  const LoopbackListener listener;
  const Check check = of("master", check_network({"lo"}, {{"MASTER_ADDR", listener.address()},
                                                          {"MASTER_PORT", std::to_string(listener.port())}}));
  EXPECT_EQ(check.verdict, Verdict::good);
}

TEST(NetworkChecks, AMasterOfNowhereIsAProblemAfterFiveSeconds) {
  using Clock = std::chrono::steady_clock;
  for (const char* host :
       {"nowhere.invalid", "192.0.2.1"}) {  // RFC 6761: no host has this name; RFC 5737: nor this address
    const auto start = Clock::now();
    const Check check = of("master", check_network({"lo"}, {{"MASTER_ADDR", host}, {"MASTER_PORT", "29500"}}));
    EXPECT_EQ(check.verdict, Verdict::problem) << host;
    EXPECT_THAT(check.found, HasSubstr(host));
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(8)) << host;
  }
}

}  // namespace
}  // namespace fulgur::doctor
