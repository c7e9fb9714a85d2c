#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "distributed/cluster_environment.h"
#include "distributed/launcher.h"
#include "distributed/world.h"

namespace fulgur {

struct SessionOptions {
  std::vector<c10::Device> devices{c10::kCPU};  // of each host, one rank to a device
  int64_t num_nodes = 1;                        // hosts
  WorldOptions world{};                         // its device becomes this rank's
};

// This process as one of the ranks of a run: of those that torchrun, srun or mpirun started, else with others that it
// starts itself (Launcher). With one device of one host there is nobody to meet.
// Used by one thread, but for abort().
class Session {
 public:
  // Returns when all ranks have met. Throws what Launcher and World throw; UsageError if the ranks are not as many as
  // were asked for.
  explicit Session(const SessionOptions& options);
  ~Session();  // kills the ranks that this process has started and that still run
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  World& world() { return *world_; }
  const ClusterEnvironment& environment() const { return environment_; }

  // This rank gives up: the others learn why and stop. fail() must follow, but not at once: hooks on the exception may
  // take their time. From any thread.
  void abort(std::string_view reason);

  // Waits until the ranks that this process started have ended. Throws the failure that came first: that of another
  // rank if `error` is what it caused here, else `error`. The session is of no use afterwards.
  [[noreturn]] void fail(std::exception_ptr error);

  // This rank has done its work; waits until all have. Throws as Launcher::finish does.
  void finish();

  // While it is busy, the end of the process is a failure that the other ranks must learn of, not the end of the work.
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

// The first call makes it. Throws UsageError if it was made with another number of ranks, DistributedError if it has
// failed.
Session& join(const SessionOptions& options);

bool joined();

// To be called at the end of a program: by exit_code_of(), else when the process exits (where an exit code other than 0
// is a failure of this rank, as is any exit() in the middle of a run). `error` is what ended it, if anything; what
// comes back is what to report instead. Waits for the other ranks.
std::exception_ptr end(std::exception_ptr error = nullptr);

}  // namespace process_session

}  // namespace fulgur
