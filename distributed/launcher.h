#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "distributed/cluster_environment.h"
#include "distributed/environment_variables.h"

namespace fulgur {

struct LauncherOptions {
  int64_t local_world_size = 1;  // ranks on this host, this process included
  int64_t num_nodes = 1;         // hosts; with several, NODE_RANK, MASTER_ADDR and MASTER_PORT must be set on each
  double grace_s = 2;            // from the failure of another rank until this process is ended
  double kill_after_s = 2;       // from the failure of this rank until others that still run are killed
  double timeout_s = 1800;       // from the end of this rank, or their own failure, until the others must have ended
};

// Starts the other ranks of this host as processes with this one's own command line, so what the program does around
// its training it does on every rank. They get RANK, LOCAL_RANK, WORLD_SIZE and so on (torchrun's variables), no stdin,
// and OMP_NUM_THREADS = cores / ranks on this host, which this process takes over too, unless OMP_NUM_THREADS is set.
// What they print is kept, and shown with the error if they fail: every line with "[rank 1] " in front. With
// FULGUR_RANK_OUTPUT=all it is shown on stderr as it comes.
// A rank that fails stops all: the others have grace_s to notice (their collectives fail), then they are killed. That
// goes for this process too: a thread that computes can be stopped by nothing else, so if nobody calls finish(), fail()
// or expect_failure() in that time it prints the failed rank's error and ends with its exit code. The children never
// outlive this process: the kernel kills them when it ends, however it ends. None stays a zombie. SIGCHLD is not
// ignored from now on: there would be no exit codes. If other code of the program reaps a child, finish() warns. Used
// by one thread at a time.
class Launcher {
 public:
  // Throws UsageError if num_nodes asks for variables that are missing or FULGUR_RANK_OUTPUT is another word,
  // DistributedError if a process cannot be started.
  Launcher(const LauncherOptions& options, const EnvironmentVariables& variables);
  ~Launcher();  // kills and reaps the ranks that still run
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const ClusterEnvironment& environment() const;  // of this rank

  // Before the ranks have met: throws DistributedError if one has ended, with its output and exit code.
  void check();

  // This rank knows of a failure, and calls fail() when it has tidied up, which may now take it timeout_s.
  void expect_failure();

  // This rank has done its work: returns when the others have too. Throws DistributedError with the output and the exit
  // code of the first rank that failed, or if one does not end in time.
  void finish();

  // This rank has failed: gives the others kill_after_s to end, and timeout_s to one that is ending after a failure of
  // its own, then kills them. Throws the failure that came first: that of another rank, with its output and exit code,
  // if `error` is the DistributedError that it caused here, else `error`.
  [[noreturn]] void fail(std::exception_ptr error);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Cores that this process may run on (taskset, cpusets), divided by the ranks on it; at least 1.
int64_t threads_per_rank(int64_t local_world_size);

}  // namespace fulgur
