#pragma once

#include <string_view>

namespace fulgur {

// Notes SIGTERM and SIGINT while it lives, and under SLURM also SIGUSR1, with which SLURM announces the end of the
// job's time, so that fit can save and end after the running step or during a validation. A second SIGINT ends the
// process at once. A signal that the program handles itself is left to the program. Several watches may live at once,
// in any threads: all see the signal, and the last one to be destroyed restores the handlers from before the first.
class SignalWatch {
 public:
  explicit SignalWatch(bool active);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int pending() const;  // the signal that came; 0: none

 private:
  const bool active_;
};

std::string_view signal_name(int signal);  // "SIGTERM"; for the signals that SignalWatch notes

// Queues the job again, which SLURM is about to end for its time limit.
void requeue_slurm_job();

}  // namespace fulgur
