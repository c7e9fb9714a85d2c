#pragma once

#include <string_view>

namespace fulgur {

// Notes SIGTERM and SIGINT while it lives, and under SLURM also SIGUSR1, with which it announces the end of the job's
// time, so that fit can save and end after the running step or amid a validation. A second SIGINT ends the process at
// once. A signal that the program handles itself is left to it. Several may live at once, in any threads: a signal is
// for all of them, and the last one to go puts the handlers back that were there before the first.
class SignalWatch {
 public:
  explicit SignalWatch(bool active);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int pending() const;  // the one that came; 0: none

 private:
  const bool active_;
};

std::string_view signal_name(int signal);  // "SIGTERM"; for the signals that SignalWatch notes

// SLURM is about to end the job for its time limit.
void requeue_slurm_job();

}  // namespace fulgur
