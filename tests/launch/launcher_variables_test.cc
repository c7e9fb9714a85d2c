#include "fulgur/launch/launcher_variables.h"

#include <gtest/gtest.h>

#include <string>

#include "fulgur/launch/cluster_environment.h"

namespace fulgur {
namespace {

// The variables of one rank of two as its launcher sets them, so far as they say where the rank belongs.
const EnvironmentVariables kTorchrun{{"RANK", "1"},
                                     {"WORLD_SIZE", "2"},
                                     {"LOCAL_RANK", "1"},
                                     {"LOCAL_WORLD_SIZE", "2"},
                                     {"GROUP_RANK", "0"},
                                     {"GROUP_WORLD_SIZE", "1"},
                                     {"ROLE_RANK", "1"},
                                     {"ROLE_NAME", "default"},
                                     {"ROLE_WORLD_SIZE", "2"},
                                     {"MASTER_ADDR", "host"},
                                     {"MASTER_PORT", "29500"},
                                     {"TORCHELASTIC_RESTART_COUNT", "0"},
                                     {"TORCHELASTIC_MAX_RESTARTS", "0"},
                                     {"TORCHELASTIC_RUN_ID", "none"},
                                     {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                     {"TORCHELASTIC_ERROR_FILE", "/tmp/error.json"}};
const EnvironmentVariables kSlurm{{"SLURM_JOB_ID", "4711"},
                                  {"SLURM_STEP_ID", "0"},
                                  {"SLURM_PROCID", "1"},
                                  {"SLURM_LOCALID", "1"},
                                  {"SLURM_NODEID", "0"},
                                  {"SLURM_NTASKS", "2"},
                                  {"SLURM_STEP_NUM_TASKS", "2"},
                                  {"SLURM_STEP_TASKS_PER_NODE", "2"},
                                  {"SLURM_STEP_NODELIST", "gpu007"},
                                  {"SLURM_JOB_NODELIST", "gpu007"},
                                  {"PMI_RANK", "1"},
                                  {"PMIX_RANK", "1"}};
const EnvironmentVariables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                                    {"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                    {"OMPI_MCA_ess_base_jobid", "1"},
                                    {"PMIX_NAMESPACE", "prterun-host-1234@1"},
                                    {"PMIX_RANK", "1"},
                                    {"PRTE_LAUNCHED", "1"}};
const EnvironmentVariables kFulgur{
    {"RANK", "1"},      {"WORLD_SIZE", "2"},          {"LOCAL_RANK", "1"},      {"LOCAL_WORLD_SIZE", "2"},
    {"NODE_RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}, {"FULGUR_PARENT_PID", "1"}};

TEST(LauncherVariables, HaveEveryVariableOfEachLauncher) {
  for (const EnvironmentVariables& launcher : {kTorchrun, kSlurm, kOpenMpi, kFulgur}) {
    ASSERT_TRUE(detect_cluster_environment(launcher));
    for (const auto& [name, value] : launcher) EXPECT_TRUE(is_launcher_variable(name)) << name;
  }
}

TEST(LauncherVariables, LeaveTheSettingsOfTheUserAlone) {
  for (const char* name : {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "FULGUR_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
                           "FULGUR_SHARED_MEMORY", "PATH", "RANKS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}) {
    EXPECT_FALSE(is_launcher_variable(name)) << name;
  }
}

}  // namespace
}  // namespace fulgur
