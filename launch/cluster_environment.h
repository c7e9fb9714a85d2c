#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fulgur/base/environment_variables.h"

namespace fulgur {

// This process's rank among the processes that train together, and the address where they meet.
struct ClusterEnvironment {
  std::string name;  // launcher: "torchrun", "SLURM", "Open MPI", "fulgur"
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0;  // among the ranks on this host
  int64_t local_world_size = 1;
  bool local_world_size_is_known = true;     // false: local_world_size is a guess, because no variable tells it
  int64_t node_rank = 0;                     // index of this host among the hosts
  std::string master_address = "127.0.0.1";  // host of rank 0: a name, IPv4 or IPv6
  uint16_t master_port = 0;
  std::string store_prefix{};                 // begins every key if the store outlives a run (torchrun's agent's)
  bool launcher_keeps_store = false;          // torchrun's agent listens at the port; false: rank 0 must listen
  std::optional<int> listening_descriptor{};  // rank 0: a socket that already listens at the port
};

// Reads the variables that torchrun, srun or mpirun set; fulgur's own launcher sets torchrun's variables. Returns
// nullopt if no such program started this process, or if srun started it as its only task and `num_ranks` is above 1:
// an interactive shell (srun --pty bash) is such a task.
//   torchrun  RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; LOCAL_WORLD_SIZE, GROUP_RANK
//   SLURM     SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_STEP_NODELIST
//   Open MPI  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
// MASTER_ADDR and MASTER_PORT are used with SLURM and Open MPI too. Without them SLURM takes the first host of the step
// and a port made from the job's number, and Open MPI on one host takes the loopback and a port made from the job's
// name. Throws UsageError, with a remedy, for a variable that is missing, malformed or contradicts another.
std::optional<ClusterEnvironment> detect_cluster_environment(const EnvironmentVariables& variables,
                                                             int64_t num_ranks = 1);

// Throws UsageError unless the environment has num_devices ranks on each of num_nodes hosts. Where the ranks of this
// host are not known, only all ranks are counted, and the local rank must be below num_devices.
void check_world_size(const ClusterEnvironment& environment, int64_t num_devices, int64_t num_nodes);

// The first host in SLURM's notation: "gpu[007-012,20]-ib,login1" -> "gpu007-ib".
std::string first_slurm_host(const std::string& node_list);

}  // namespace fulgur
