#pragma once

#include <signal.h>

#include <utility>
#include <vector>

namespace fulgur {

// Notes SIGTERM and SIGINT while it lives, and under SLURM also SIGUSR1, with which it announces the end of the job's
// time, so that fit can save and end after the running step or amid a validation. A second SIGINT ends the process at
// once. A signal that the program handles itself is left to it. The handlers that were there come back.
class SignalWatch {
 public:
  explicit SignalWatch(bool active);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int pending() const;  // the one that came; 0: none

 private:
  void watch(int signal);

  std::vector<std::pair<int, struct sigaction>> before_;
};

// SLURM is about to end the job for its time limit.
void requeue_slurm_job();

}  // namespace fulgur
