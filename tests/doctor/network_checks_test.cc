#include "fulgur/doctor/network_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/distributed/network.h"

namespace fulgur::doctor {
namespace {

using ::testing::HasSubstr;

Check interfaces_of(const std::vector<std::string>& interfaces, const EnvironmentVariables& variables) {
  return check_network_settings(interfaces, variables).at(0);
}

Check launcher_of(const EnvironmentVariables& variables) { return check_network_settings({"lo"}, variables).at(1); }

EnvironmentVariables with_master(const std::string& host, uint16_t port, EnvironmentVariables variables = {}) {
  variables["MASTER_ADDR"] = host;
  variables["MASTER_PORT"] = std::to_string(port);
  return variables;
}

EnvironmentVariables rank_of_two(int rank) {
  return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}};
}

uint16_t free_port() { return LoopbackListener().port(); }

TEST(NetworkChecks, AHostWithoutInterfacesIsSaidToHaveNone) {
  const Check check = interfaces_of({}, {});
  EXPECT_EQ(check.topic, "interfaces");
  EXPECT_EQ(check.found, "none");
  EXPECT_EQ(check.verdict, Verdict::warning);
  EXPECT_THAT(interfaces_of({"lo"}, {}).found, HasSubstr("lo alone"));
}

TEST(NetworkChecks, AnInterfaceThatIsNamedMustExist) {
  EXPECT_EQ(interfaces_of({"lo", "eth0"}, {{"GLOO_SOCKET_IFNAME", "eth0"}}).verdict, Verdict::good);
  const Check check = interfaces_of({"lo", "eth0"}, {{"FULGUR_SOCKET_IFNAME", "eth1"}});
  EXPECT_EQ(check.verdict, Verdict::problem);
  EXPECT_EQ(check.found, "lo, eth0; FULGUR_SOCKET_IFNAME=eth1");
}

TEST(NetworkChecks, WithoutALauncherThereIsNoMaster) {
  EXPECT_THAT(launcher_of({}).found, HasSubstr("none"));
  EXPECT_FALSE(check_master({}));
  EXPECT_FALSE(check_master({{"RANK", "0"},
                             {"WORLD_SIZE", "1"},
                             {"LOCAL_RANK", "0"},
                             {"MASTER_ADDR", "nowhere.invalid"},
                             {"MASTER_PORT", "29500"}}));  // a single rank meets nobody
}

TEST(NetworkChecks, VariablesThatContradictEachOtherAreAProblem) {
  const EnvironmentVariables variables =
      with_master("127.0.0.1", 1, {{"RANK", "3"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}});
  EXPECT_EQ(launcher_of(variables).verdict, Verdict::problem);
  EXPECT_THAT(launcher_of(variables).found, HasSubstr("RANK"));
  EXPECT_FALSE(check_master(variables));
}

TEST(NetworkChecks, AMasterThatListensIsGoodExceptWhereThisRankIsToListen) {
  const LoopbackListener listener;
  const auto variables = [&](const EnvironmentVariables& rank) {
    return with_master(listener.address(), listener.port(), rank);
  };
  EXPECT_EQ(check_master(variables({}))->verdict, Verdict::good);
  EXPECT_EQ(check_master(variables(rank_of_two(1)))->verdict, Verdict::good);
  const Check taken = *check_master(variables(rank_of_two(0)));
  EXPECT_EQ(taken.verdict, Verdict::problem);
  EXPECT_THAT(taken.advice, HasSubstr("another MASTER_PORT"));
}

TEST(NetworkChecks, AMasterThatDoesNotListenYetIsGoodUnlessTheLauncherShouldListen) {
  for (const EnvironmentVariables& rank : {EnvironmentVariables{}, rank_of_two(0), rank_of_two(1)}) {
    const Check check = *check_master(with_master("127.0.0.1", free_port(), rank));
    EXPECT_EQ(check.verdict, Verdict::good) << check.found;
    EXPECT_THAT(check.found, HasSubstr("nobody listens yet"));
  }
  EnvironmentVariables torchrun = with_master("127.0.0.1", free_port(), rank_of_two(0));
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  const Check check = *check_master(torchrun);
  EXPECT_EQ(check.verdict, Verdict::problem);
  EXPECT_THAT(check.advice, HasSubstr("torchrun still runs"));
}

TEST(NetworkChecks, AMasterOfNowhereIsAProblem) {
  // RFC 6761: no host has the name; there is no way to the address of all hosts.
  const std::vector<EnvironmentVariables> nowhere{with_master("nowhere.invalid", 29500),
                                                  with_master("nowhere.invalid", 29500, rank_of_two(0)),
                                                  with_master("255.255.255.255", 29500, rank_of_two(1))};
  std::vector<std::future<std::optional<Check>>> checks;
  for (const EnvironmentVariables& variables : nowhere) {
    checks.push_back(std::async(std::launch::async, [&variables] { return check_master(variables); }));
  }
  for (size_t i = 0; i < nowhere.size(); ++i) {
    const Check check = *checks[i].get();
    EXPECT_EQ(check.verdict, Verdict::problem) << check.found;
    EXPECT_THAT(check.found, HasSubstr(nowhere[i].at("MASTER_ADDR")));
  }
}

TEST(NetworkChecks, AMasterWithoutAPortIsLookedForAllTheSame) {
  const Check nowhere = *check_master({{"MASTER_ADDR", "nowhere.invalid"}});
  EXPECT_EQ(nowhere.verdict, Verdict::problem);
  EXPECT_THAT(nowhere.found, HasSubstr("MASTER_PORT is not set"));
  EXPECT_EQ(check_master({{"MASTER_ADDR", "127.0.0.1"}})->verdict, Verdict::good);
  const Check no_port = *check_master({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "http"}});
  EXPECT_EQ(no_port.verdict, Verdict::problem);
  EXPECT_THAT(no_port.found, HasSubstr("MASTER_PORT=http"));
}

}  // namespace
}  // namespace fulgur::doctor
