#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/distributed/world.h"
#include "fulgur/launch/cluster_environment.h"
#include "fulgur/launch/launcher.h"

namespace fulgur {

struct SessionOptions {
  std::vector<c10::Device> devices{c10::kCPU};  // devices of each host; one rank per device
  int64_t num_nodes = 1;                        // number of hosts
  WorldOptions world{};                         // WorldOptions::device is replaced by this rank's device
};

// Makes this process one of the ranks of a run: a rank started by torchrun, srun or mpirun, or otherwise the first rank
// of this host, which starts the others (Launcher). With one device on one host there is only this rank. Threading: one
// thread, except for abort().
class Session {
 public:
  // Returns when all ranks have met. Throws what Launcher and World throw, and UsageError if the number of ranks
  // differs from the requested one.
  explicit Session(const SessionOptions& options);
  ~Session();  // kills the ranks that this process has started and that are still running
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  World& world() { return *world_; }
  const ClusterEnvironment& environment() const { return environment_; }

  // Aborts the run: the other ranks learn the reason and stop. fail() must follow, but not at once: hooks on the
  // exception may take time. Threading: any thread.
  void abort(const std::string& reason);

  // Waits until the ranks that this process started have ended. Throws the first failure: that of another rank if it
  // caused `error`, otherwise `error`. The session cannot be used afterwards.
  [[noreturn]] void fail(std::exception_ptr error);

  // To be called when this rank has finished its work; waits until all ranks have. Throws as Launcher::finish does.
  void finish();

  // If the process ends while the session is busy, the other ranks learn of a failure; otherwise the work has ended.
  void set_busy(bool busy) { busy_ = busy; }
  bool busy() const { return busy_; }

 private:
  bool busy_ = false;
  std::optional<Launcher> launcher_;
  ClusterEnvironment environment_;
  std::optional<World> world_;
};

// The one session of this process, which all its Trainers share: ranks that were started once serve every run.
namespace process_session {

// The first call creates the session. Throws UsageError if the session was created with another number of ranks or on
// other devices, DistributedError if it has failed.
Session& join(const SessionOptions& options);

bool joined();

// To be called at the end of a program: by exit_code_of(), or otherwise when the process exits (an exit code other than
// 0, and any exit() in the middle of a run, is then a failure of this rank; that of a forked child is not). `error` is
// what ended the program, or null; the result is the error to report instead. Waits for the other ranks.
std::exception_ptr end(std::exception_ptr error = nullptr);

}  // namespace process_session

}  // namespace fulgur
