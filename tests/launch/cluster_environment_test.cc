#include "fulgur/launch/cluster_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <future>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/error.h"
#include "fulgur/launch/launcher.h"
#include "fulgur/launch/rendezvous.h"
#include "fulgur/launch/session.h"
#include "fulgur/strategies/presets/ddp.h"
#include "fulgur/trainer/choose_strategy.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

const EnvironmentVariables kTorchrun{
    {"RANK", "3"},       {"WORLD_SIZE", "4"},         {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "2"},
    {"GROUP_RANK", "1"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};
const EnvironmentVariables kSlurm{{"SLURM_JOB_ID", "4711"},
                                  {"SLURM_STEP_ID", "0"},
                                  {"SLURM_PROCID", "3"},
                                  {"SLURM_LOCALID", "0"},
                                  {"SLURM_NODEID", "1"},
                                  {"SLURM_STEP_NUM_TASKS", "4"},
                                  {"SLURM_NTASKS", "8"},
                                  {"SLURM_STEP_TASKS_PER_NODE", "3,1"},
                                  {"SLURM_STEP_NODELIST", "gpu[007-008]"}};
const EnvironmentVariables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                                    {"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                    {"PMIX_NAMESPACE", "prterun-host-1234@1"}};

EnvironmentVariables with(EnvironmentVariables variables, const EnvironmentVariables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

TEST(ClusterEnvironment, IsNothingWithoutALauncher) {
  EXPECT_FALSE(detect_cluster_environment({}));
  EXPECT_FALSE(detect_cluster_environment({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"NODE_RANK", "0"}}));
  EXPECT_FALSE(detect_cluster_environment({{"RANK", ""}}));
  EXPECT_FALSE(detect_cluster_environment({{"SLURM_JOB_ID", "1"}, {"SLURM_NTASKS", "4"}}));  // the shell of salloc
  EXPECT_FALSE(detect_cluster_environment({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}));  // a script with one task
}

TEST(ClusterEnvironment, ReadsTorchrun) {
  const ClusterEnvironment environment = *detect_cluster_environment(kTorchrun);
  EXPECT_EQ(environment.name, "torchrun");
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_EQ(environment.node_rank, 1);
  EXPECT_EQ(environment.master_address, "10.0.0.1");
  EXPECT_EQ(environment.master_port, 29500);
  EXPECT_FALSE(environment.launcher_keeps_store);
}

TEST(ClusterEnvironment, UsesTheStoreOfTorchrunsAgent) {
  const EnvironmentVariables agent{{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}};
  const ClusterEnvironment environment = *detect_cluster_environment(with(kTorchrun, agent));
  EXPECT_TRUE(environment.launcher_keeps_store);
  EXPECT_EQ(environment.store_prefix, "fulgur/");
}

TEST(ClusterEnvironment, ReadsSlurm) {
  const ClusterEnvironment environment = *detect_cluster_environment(kSlurm);
  EXPECT_EQ(environment.name, "SLURM");
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 0);
  EXPECT_EQ(environment.local_world_size, 1);
  EXPECT_EQ(environment.node_rank, 1);
  EXPECT_EQ(environment.master_address, "gpu007");
  EXPECT_GE(environment.master_port, 15000);
  EXPECT_EQ(detect_cluster_environment(with(kSlurm, {{"SLURM_PROCID", "0"}}))->master_port, environment.master_port);
  EXPECT_NE(detect_cluster_environment(with(kSlurm, {{"SLURM_STEP_ID", "1"}}))->master_port, environment.master_port);
  EXPECT_EQ(detect_cluster_environment(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}}))->local_world_size, 2);
  EXPECT_EQ(detect_cluster_environment(with(kSlurm, {{"MASTER_PORT", "123"}}))->master_port, 123);
}

TEST(ClusterEnvironment, TakesTheOnlyTaskOfSrunForAShellWhereMoreRanksAreAskedFor) {
  const EnvironmentVariables shell = with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}});
  EXPECT_EQ(detect_cluster_environment(shell)->world_size, 1);
  EXPECT_FALSE(detect_cluster_environment(shell, 2));
  EXPECT_EQ(detect_cluster_environment(kSlurm, 2)->world_size, 4);
  const EnvironmentVariables child = with(shell, with(kTorchrun, {{"FULGUR_PARENT_PID", "1"}}));
  EXPECT_EQ(detect_cluster_environment(child, 4)->rank, 3);
}

TEST(ClusterEnvironment, ReadsSlurmsListsOfHosts) {
  EXPECT_EQ(first_slurm_host("gpu[007-012,20],login1"), "gpu007");
  EXPECT_EQ(first_slurm_host("gpu[3,5]"), "gpu3");
  EXPECT_EQ(first_slurm_host("node[1-2]-ib"), "node1-ib");
  EXPECT_EQ(first_slurm_host("rack[1-2]node[03-04]x,login1"), "rack1node03x");
  EXPECT_EQ(first_slurm_host("gpu[3]"), "gpu3");
  EXPECT_EQ(first_slurm_host("login1,gpu[3,5]"), "login1");
  EXPECT_EQ(first_slurm_host("login1"), "login1");
}

TEST(ClusterEnvironment, ReadsOpenMpi) {
  const ClusterEnvironment environment = *detect_cluster_environment(kOpenMpi);
  EXPECT_EQ(environment.name, "Open MPI");
  EXPECT_EQ(environment.rank, 1);
  EXPECT_EQ(environment.world_size, 2);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_EQ(environment.node_rank, 0);
  EXPECT_EQ(environment.master_address, "127.0.0.1");
  const auto port_with = [](const EnvironmentVariables& changes) {
    return detect_cluster_environment(with(kOpenMpi, changes))->master_port;
  };
  EXPECT_EQ(port_with({{"OMPI_COMM_WORLD_RANK", "0"}}), environment.master_port);
  EXPECT_NE(port_with({{"PMIX_NAMESPACE", "prterun-host-1234@2"}}), environment.master_port);
}

struct Refusal {
  std::string name;
  EnvironmentVariables variables;
  std::string message;
};

class Refused : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refused, WithTheVariableAndWhatToDo) {
  EXPECT_THAT(message_of<UsageError>([] { detect_cluster_environment(GetParam().variables); }),
              HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Variables, Refused,
    ::testing::Values(
        Refusal{"RankAlone", {{"RANK", "0"}}, "WORLD_SIZE is not set; start every rank with torchrun, or unset"},
        Refusal{"NoMaster", with(kTorchrun, {{"MASTER_ADDR", ""}}), "MASTER_ADDR is not set"},
        Refusal{"NoPort", with(kTorchrun, {{"MASTER_PORT", ""}}), "MASTER_PORT is not set"},
        Refusal{"NoNumber", with(kTorchrun, {{"RANK", "one"}}), "RANK=one is not a number from 0"},
        Refusal{"Port", with(kTorchrun, {{"MASTER_PORT", "70000"}}),
                "MASTER_PORT=70000 is not a number from 1 to 65535"},
        Refusal{"RankTooLarge", with(kTorchrun, {{"RANK", "4"}}),
                "RANK=4 contradicts WORLD_SIZE=4: it counts from 0 to 3"},
        Refusal{"LocalRank", with(kTorchrun, {{"LOCAL_RANK", "2"}}), "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"},
        Refusal{"TwoLaunchers", with(kOpenMpi, with(kTorchrun, {{"RANK", "0"}})),
                "RANK=0 and OMPI_COMM_WORLD_RANK=1 contradict each other"},
        Refusal{"MpiSize", with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", ""}}), "OMPI_COMM_WORLD_SIZE is not set"},
        Refusal{"MpiHosts", with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}}), "-x MASTER_ADDR=<host of rank 0>"},
        Refusal{"SlurmRank", with(kSlurm, with(kTorchrun, {{"RANK", "0"}})),
                "RANK=0 and SLURM_PROCID=3 contradict each other"},
        Refusal{"NoSrun", {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}, "write srun before the command"},
        Refusal{"SlurmTask", with(kSlurm, {{"SLURM_PROCID", "4"}}),
                "SLURM_PROCID=4 contradicts SLURM_STEP_NUM_TASKS=4"},
        Refusal{"SlurmHosts", with(kSlurm, {{"SLURM_STEP_NODELIST", ""}}), "SLURM_JOB_NODELIST is not set"}),
    [](const auto& param) { return param.param.name; });

TEST(ClusterEnvironment, MustHaveTheSizeAskedFor) {
  const ClusterEnvironment environment = *detect_cluster_environment(kTorchrun);
  check_world_size(environment, 2, 2);
  EXPECT_THAT(message_of<UsageError>([&] { check_world_size(environment, 2, 1); }),
              HasSubstr("torchrun started 4 ranks, but devices=2 and num_nodes=1 need 2"));
}

TEST(ClusterEnvironment, MustHaveAsManyRanksOnEachHostAsAskedFor) {
  ClusterEnvironment environment{.name = "torchrun", .world_size = 4, .local_rank = 1, .local_world_size = 4};
  EXPECT_EQ(
      message_of<UsageError>([&] { check_world_size(environment, 2, 2); }),
      "torchrun started 4 of the 4 ranks on this host, but devices=2 and num_nodes=2 need 2 on each host; start 2 "
      "ranks on each of 2 hosts, or write devices=4 and num_nodes=1");
  environment.local_world_size = 3;
  EXPECT_EQ(
      message_of<UsageError>([&] { check_world_size(environment, 2, 2); }),
      "torchrun started 3 of the 4 ranks on this host, but devices=2 and num_nodes=2 need 2 on each host; start 2 "
      "ranks on each of 2 hosts");
}

TEST(ClusterEnvironment, MustHaveADeviceForTheLocalRankWhereTheHostsRanksAreNotKnown) {
  EnvironmentVariables variables = kTorchrun;
  variables.erase("LOCAL_WORLD_SIZE");
  check_world_size(*detect_cluster_environment(variables), 2, 2);
  EXPECT_THAT(message_of<UsageError>(
                  [&] { check_world_size(*detect_cluster_environment(with(variables, {{"LOCAL_RANK", "3"}})), 2, 2); }),
              HasSubstr("local rank 3, but devices=2 needs 2 ranks on each host, whose local ranks are 0 to 1"));
}

TEST(Rendezvous, OfTorchrunsRanksMeetsWhateverTheirRestartCountsAndWhatFailedAttemptsLeft) {
  c10d::TCPStoreOptions server;
  server.isServer = true;
  server.port = 0;
  server.waitWorkers = false;
  const c10d::TCPStore agents("127.0.0.1", server);
  const auto connect = [&](const std::string& rank, const std::string& restarts, double timeout_s) {
    const EnvironmentVariables variables{{"RANK", rank},
                                         {"WORLD_SIZE", "2"},
                                         {"LOCAL_RANK", rank},
                                         {"LOCAL_WORLD_SIZE", "2"},
                                         {"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", std::to_string(agents.getPort())},
                                         {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                         {"TORCHELASTIC_RESTART_COUNT", restarts}};
    WorldOptions options{.connect_timeout_s = timeout_s, .heartbeat_interval_s = 0.1};
    options.collectives.shared_memory = false;
    return connect_world(*detect_cluster_environment(variables), options, [] {});
  };
  const auto failure_of = [&](const std::string& rank) {
    return message_of<DistributedError>([&] { connect(rank, "0", 0.3); });
  };
  EXPECT_EQ(failure_of("1"), "rank 1: of 2 ranks, rank 0 has not joined within 0.3 s");
  EXPECT_EQ(failure_of("0"), "rank 0: of 2 ranks, rank 1 has not joined within 0.3 s");
  EXPECT_EQ(failure_of("1"), "rank 1: of 2 ranks, rank 0 has not joined within 0.3 s");
  for (int run = 0; run < 2; ++run) {
    auto other = std::async(std::launch::async, [&] {
      World world = connect("1", "1", 20);
      world.leave();
      return world.rank();
    });
    World world = connect("0", "0", 20);
    world.leave();
    EXPECT_EQ(other.get(), 1);
  }
}

TEST(RankOptions, RefuseTimesThatHaveNoEnd) {
  for (const std::string name : {"timeout_s", "connect_timeout_s", "heartbeat_timeout_s"}) {
    struct Setter final : FieldVisitor {
      void operator()(const Field& field, FieldValue value) override {
        if (field.name == name) set_field(field, value, text);
      }
      std::string name, text;
    } setter;
    setter.name = name;
    Ddp options;
    for (const char* text : {"inf", "1e10"}) {
      setter.text = text;
      EXPECT_THAT(message_of<UsageError>([&] { options.describe(setter); }),
                  HasSubstr(name + " must be at most 1000000000; got "));
    }
    setter.text = "1e9";
    options.describe(setter);
  }
}

// Each rank sees one GPU under srun --gpus-per-task=1, or a wrapper that sets CUDA_VISIBLE_DEVICES for each rank.
TEST(OneGpuForEachRank, IsTheOneThatItSees) {
  const c10::Device gpu(c10::kCUDA, 0), other(c10::kCUDA, 1), cpu(c10::kCPU);
  const ClusterEnvironment four{.name = "SLURM", .world_size = 8, .local_world_size = 4}, one{.name = "SLURM"};
  const std::vector<c10::Device> gpu_four_times{gpu, gpu, gpu, gpu};
  EXPECT_EQ(one_gpu_for_each_rank(four, "auto", {gpu}), gpu_four_times);
  EXPECT_EQ(one_gpu_for_each_rank(four, 4, {gpu}), gpu_four_times);
  EXPECT_EQ(one_gpu_for_each_rank(four, 2, {gpu}), std::nullopt);
  EXPECT_EQ(one_gpu_for_each_rank(four, {0, 1, 2, 3}, {gpu}), std::nullopt);
  EXPECT_EQ(one_gpu_for_each_rank(four, "auto", {gpu, other}), std::nullopt);
  EXPECT_EQ(one_gpu_for_each_rank(four, "auto", {cpu}), std::nullopt);
  EXPECT_EQ(one_gpu_for_each_rank(one, "auto", {gpu}), std::nullopt);
  EXPECT_EQ(one_gpu_for_each_rank(std::nullopt, "auto", {gpu}), std::nullopt);
}

TEST(ThreadsPerRank, AreForTheCoresThatThisThreadMayUse) {
  cpu_set_t before, one;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  const int64_t num_cores = CPU_COUNT(&before);
  EXPECT_EQ(threads_per_rank(1), num_cores);
  EXPECT_EQ(threads_per_rank(num_cores), 1);
  EXPECT_EQ(threads_per_rank(num_cores + 1), 1);
  int core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(threads_per_rank(1), 1);
  ::sched_setaffinity(0, sizeof before, &before);
}

TEST(ProcessSession, ServesLaterRunsOnTheSameDevicesOnly) {
  const auto join = [](c10::Device device) { process_session::join({.devices = {device}}); };
  join(c10::kCPU);
  join(c10::kCPU);
  EXPECT_THAT(
      message_of<UsageError>([&] { join({c10::kCUDA, 1}); }),
      HasSubstr("an earlier run of this process was made on cpu, and its ranks serve all later ones; got cuda:1"));
  EXPECT_EQ(process_session::end(), nullptr);
}

}  // namespace
}  // namespace fulgur
