#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "fulgur/base/environment_variables.h"
#include "fulgur/launch/cluster_environment.h"

namespace fulgur {

struct LauncherOptions {
  int64_t local_world_size = 1;  // ranks on this host, this process included
  int64_t num_nodes = 1;         // hosts; with several, NODE_RANK, MASTER_ADDR and MASTER_PORT must be set on each
  double grace_s = 2;            // time from the failure of another rank until this process is ended
  double kill_after_s = 2;       // time that other ranks get to end after a failure, before they are killed
  double timeout_s = 1800;       // time that other ranks get to end after this rank, or after a failure of their own
};

// Starts the other ranks of this host as processes with the command line of this process, so that every rank also runs
// the program's code before and after the training. The processes get RANK, LOCAL_RANK, WORLD_SIZE and so on
// (torchrun's variables), no stdin, and, unless OMP_NUM_THREADS is set, OMP_NUM_THREADS = cores / ranks on this host,
// which applies to this process too. Their output is kept, and shown with the error if they fail: every line with
// "[rank 1] " in front. With FULGUR_RANK_OUTPUT=all the output is shown on stderr as it comes.
//
// A rank that fails stops all: the others have grace_s to notice (their collectives fail), then they are killed. The
// same holds for this process: a thread that computes cannot be stopped in any other way, so unless finish(), fail() or
// expect_failure() is called in that time, the launcher prints the failed rank's error and ends the process with its
// exit code. The children never outlive this process: the kernel kills them when it ends, however it ends. No child
// stays a zombie. The constructor ends the ignoring of SIGCHLD, because there would be no exit codes otherwise. If
// other code of the program reaps a child, finish() logs a warning. Threading: one thread at a time.
class Launcher {
 public:
  // Throws UsageError if num_nodes needs variables that are missing or FULGUR_RANK_OUTPUT has an unknown value,
  // DistributedError if a process cannot be started.
  Launcher(const LauncherOptions& options, const EnvironmentVariables& variables);
  ~Launcher();  // kills and reaps the ranks that are still running
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const ClusterEnvironment& environment() const;  // the environment of this rank

  // To be called until the ranks have met: throws DistributedError, with output and exit code, if a rank has ended.
  void check();

  // Announces that this rank knows of a failure and will call fail() after cleaning up, which may now take timeout_s.
  void expect_failure();

  // To be called when this rank has finished its work: returns when the others have too. Throws DistributedError with
  // the output and the exit code of the first rank that failed, or if a rank does not end in time.
  void finish();

  // To be called when this rank has failed: gives the others kill_after_s to end, and timeout_s to a rank that is
  // ending after a failure of its own, then kills them. Throws the first failure: if `error` is a DistributedError that
  // another rank caused, that rank's error, with its output and exit code; otherwise `error`.
  [[noreturn]] void fail(std::exception_ptr error);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The number of cores on which this process may run (taskset, cpusets), divided by the ranks on this host; at least 1.
int64_t threads_per_rank(int64_t local_world_size);

}  // namespace fulgur
