#include "fulgur/launch/cluster_environment.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

constexpr const char* kMasterAddress = "MASTER_ADDR";
constexpr const char* kMasterPort = "MASTER_PORT";

// Reads the variables of one launcher.
class Variables {
 public:
  Variables(const EnvironmentVariables& variables, std::string launcher)
      : variables_(variables), launcher_(std::move(launcher)) {}

  bool has(const std::string& name) const { return find_variable(variables_, name).has_value(); }

  std::string text(const std::string& name) const {
    if (const auto value = find_variable(variables_, name)) return *value;
    throw UsageError(
        fmt::format("started by {} (by its variables), but {} is not set; start every rank with {}, or unset "
                    "its variables to let fulgur start the ranks",
                    launcher_, name, launcher_));
  }

  int64_t number(const std::string& name, int64_t low = 0, int64_t high = std::numeric_limits<int32_t>::max()) const {
    const std::string value = text(name);
    int64_t parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    if (error == std::errc{} && end == value.data() + value.size() && low <= parsed && parsed <= high) return parsed;
    throw UsageError(fmt::format("{}={} is not a number from {} to {}; {} sets it", name, value, low, high, launcher_));
  }

  int64_t number_or(const std::string& name, int64_t otherwise) const { return has(name) ? number(name) : otherwise; }

  // Number `name` counts from 0, so it is below number `size_name`.
  int64_t place(const std::string& name, const std::string& size_name) const {
    const int64_t value = number(name);
    if (value < number(size_name, 1)) return value;
    throw UsageError(fmt::format("{}={} contradicts {}={}: it counts from 0 to {}", name, value, size_name,
                                 text(size_name), number(size_name) - 1));
  }

  uint16_t port() const { return static_cast<uint16_t>(number(kMasterPort, 1, 65535)); }

  // Variables of two launchers that mean the same must be equal.
  void check_agrees(const std::string& name, const std::string& other) const {
    if (!has(other) || number(name) == number(other)) return;
    throw UsageError(
        fmt::format("{}={} and {}={} contradict each other: unset the one that does not come from what "
                    "started this process",
                    name, text(name), other, text(other)));
  }

 private:
  const EnvironmentVariables& variables_;
  const std::string launcher_;
};

// A port derived from the job's name alone, so that every rank gets the same one.
uint16_t port_of_job(std::string_view name) {
  uint32_t hash = 2166136261;  // FNV-1a
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619;
  return static_cast<uint16_t>(15000 + hash % 15000);  // below the range from which systems assign ports
}

ClusterEnvironment from_torchrun(const EnvironmentVariables& all) {
  const bool by_fulgur = find_variable(all, "FULGUR_PARENT_PID").has_value();
  const Variables variables(all, by_fulgur ? "fulgur" : "torchrun");
  ClusterEnvironment environment{.name = by_fulgur ? "fulgur" : "torchrun"};
  environment.rank = variables.place("RANK", "WORLD_SIZE");
  environment.world_size = variables.number("WORLD_SIZE", 1);
  environment.local_rank = variables.place("LOCAL_RANK", "WORLD_SIZE");
  environment.local_world_size = environment.world_size;
  environment.local_world_size_is_known = variables.has("LOCAL_WORLD_SIZE");
  if (environment.local_world_size_is_known) {
    variables.place("LOCAL_RANK", "LOCAL_WORLD_SIZE");
    environment.local_world_size = variables.number("LOCAL_WORLD_SIZE", 1, environment.world_size);
  }
  environment.node_rank = variables.number_or("GROUP_RANK", variables.number_or("NODE_RANK", 0));
  environment.master_address = variables.text(kMasterAddress);
  environment.master_port = variables.port();
  if (!by_fulgur && !variables.has("TORCHELASTIC_RUN_ID")) {
    variables.check_agrees("RANK", "OMPI_COMM_WORLD_RANK");
    if (variables.has("SLURM_STEP_ID")) variables.check_agrees("RANK", "SLURM_PROCID");
  }
  environment.launcher_keeps_store = find_variable(all, "TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (environment.launcher_keeps_store) environment.store_prefix = "fulgur/";
  return environment;
}

// "2(x3),1" -> how many tasks run on host `node`.
int64_t slurm_tasks_on(const std::string& tasks_per_node, int64_t node) {
  std::string_view rest = tasks_per_node;
  int64_t tasks = 1;
  while (node >= 0 && !rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
    int64_t repeat = 1;
    std::from_chars(entry.data(), entry.data() + entry.size(), tasks);
    if (const size_t x = entry.find("(x"); x != std::string_view::npos) {
      std::from_chars(entry.data() + x + 2, entry.data() + entry.size(), repeat);
    }
    node -= repeat;
  }
  return tasks;
}

ClusterEnvironment from_slurm(const EnvironmentVariables& all) {
  const Variables variables(all, "srun");
  const char* size = variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  const char* hosts = variables.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  ClusterEnvironment environment{.name = "SLURM"};
  environment.rank = variables.place("SLURM_PROCID", size);
  environment.world_size = variables.number(size, 1);
  environment.local_rank = variables.place("SLURM_LOCALID", size);
  environment.node_rank = variables.number_or("SLURM_NODEID", 0);
  environment.local_world_size_is_known = variables.has("SLURM_STEP_TASKS_PER_NODE");
  environment.local_world_size =
      environment.local_world_size_is_known
          ? slurm_tasks_on(variables.text("SLURM_STEP_TASKS_PER_NODE"), environment.node_rank)
          : variables.number_or("SLURM_NTASKS_PER_NODE", environment.world_size);
  environment.master_address =
      variables.has(kMasterAddress) ? variables.text(kMasterAddress) : first_slurm_host(variables.text(hosts));
  environment.master_port =
      variables.has(kMasterPort)
          ? variables.port()
          : port_of_job(variables.text("SLURM_JOB_ID") + "." + find_variable(all, "SLURM_STEP_ID").value_or("0"));
  return environment;
}

ClusterEnvironment from_open_mpi(const EnvironmentVariables& all) {
  const Variables variables(all, "mpirun");
  ClusterEnvironment environment{.name = "Open MPI"};
  environment.rank = variables.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  environment.world_size = variables.number("OMPI_COMM_WORLD_SIZE", 1);
  environment.local_rank = variables.place("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  environment.local_world_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, environment.world_size);
  environment.node_rank = environment.rank / environment.local_world_size;  // Open MPI sets no variable for it
  const bool one_host = environment.local_world_size == environment.world_size;
  if (!one_host && !(variables.has(kMasterAddress) && variables.has(kMasterPort))) {
    throw UsageError(
        "mpirun started ranks on several hosts, but does not tell where rank 0 is: run mpirun with "
        "-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port>");
  }
  if (variables.has(kMasterAddress)) environment.master_address = variables.text(kMasterAddress);
  environment.master_port =
      variables.has(kMasterPort)
          ? variables.port()
          : port_of_job(find_variable(all, "PMIX_NAMESPACE")
                            .value_or(find_variable(all, "OMPI_MCA_ess_base_jobid").value_or("")));
  return environment;
}

// In a batch script, without srun, SLURM's variables describe the script itself.
bool started_by_srun(const EnvironmentVariables& variables) {
  if (!find_variable(variables, "SLURM_PROCID")) return false;
  if (find_variable(variables, "SLURM_STEP_ID")) return true;
  const std::string tasks = find_variable(variables, "SLURM_NTASKS").value_or("1");
  if (tasks == "1") return false;
  throw UsageError(
      fmt::format("SLURM_NTASKS={}, but this process was not started by srun (SLURM_STEP_ID is not set): "
                  "write srun before the command in the batch script",
                  tasks));
}

}  // namespace

std::optional<ClusterEnvironment> detect_cluster_environment(const EnvironmentVariables& variables, int64_t num_ranks) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK"}) {
    if (find_variable(variables, name)) return from_torchrun(variables);
  }
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}) {
    if (find_variable(variables, name)) return from_open_mpi(variables);
  }
  if (!started_by_srun(variables)) return std::nullopt;
  const ClusterEnvironment environment = from_slurm(variables);
  if (environment.world_size == 1 && num_ranks > 1) return std::nullopt;
  return environment;
}

void check_world_size(const ClusterEnvironment& environment, int64_t num_devices, int64_t num_nodes) {
  const int64_t world_size = environment.world_size, local_world_size = environment.local_world_size;
  if (world_size != num_devices * num_nodes) {
    throw UsageError(fmt::format("{} started {} ranks, but devices={} and num_nodes={} need {}; change either",
                                 environment.name, world_size, num_devices, num_nodes, num_devices * num_nodes));
  }
  if (environment.local_world_size_is_known && local_world_size != num_devices) {
    const std::string or_write =
        world_size % local_world_size == 0
            ? fmt::format(", or write devices={} and num_nodes={}", local_world_size, world_size / local_world_size)
            : "";
    throw UsageError(
        fmt::format("{} started {} of the {} ranks on this host, but devices={} and num_nodes={} need {} on each host; "
                    "start {} ranks on each of {} hosts{}",
                    environment.name, local_world_size, world_size, num_devices, num_nodes, num_devices, num_devices,
                    num_nodes, or_write));
  }
  if (environment.local_rank >= num_devices) {
    throw UsageError(fmt::format(
        "{} started a rank with the local rank {}, but devices={} needs {} ranks on each host, whose local "
        "ranks are 0 to {}; start {} ranks on each of {} hosts, or change devices and num_nodes",
        environment.name, environment.local_rank, num_devices, num_devices, num_devices - 1, num_devices, num_nodes));
  }
}

std::string first_slurm_host(const std::string& node_list) {
  const size_t bracket = node_list.find('[');
  const size_t comma = node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return node_list.substr(0, comma);
  const size_t end = node_list.find_first_of("-,]", bracket);
  const size_t closing = node_list.find(']', bracket);
  if (closing == std::string::npos) throw UsageError(fmt::format("SLURM's list of hosts '{}' has no ']'", node_list));
  return node_list.substr(0, bracket) + node_list.substr(bracket + 1, end - bracket - 1) +
         first_slurm_host(node_list.substr(closing + 1));
}

}  // namespace fulgur
