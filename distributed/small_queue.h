#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "fulgur/distributed/host_transport.h"

namespace fulgur {

// Small all_reduces of which a rank sends parts only when those of others have arrived, so that all ranks must work on
// them in the order in which they are started: whoever waits for one finishes those before it. Threading: any.
class SmallQueue {
 public:
  // Calls `begin`, in the order of these calls; it returns what is to be done to finish the all_reduce.
  std::shared_ptr<SmallAllReduce> start(const std::function<std::function<void()>()>& begin);

 private:
  class Small;

  void finish(const Small& wanted);
  std::shared_ptr<Small> take_oldest();

  std::mutex finishing_;                        // held while waiting for other ranks
  std::mutex mutex_;                            // never held then
  std::deque<std::shared_ptr<Small>> started_;  // unfinished ones, oldest first
};

}  // namespace fulgur
