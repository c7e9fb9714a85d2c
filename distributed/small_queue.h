#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "fulgur/distributed/host_transport.h"

namespace fulgur {

// A queue of small all_reduces in which a rank sends some messages only after others have arrived. All ranks must
// therefore work on the all_reduces in the order in which they were started: a thread that waits for one first finishes
// the earlier ones, or waits for the thread that does. Threading: any thread.
class SmallQueue {
 public:
  // Calls `begin`, in the order of these calls; it returns what is to be done to finish the all_reduce.
  std::shared_ptr<SmallAllReduce> start(const std::function<std::function<void()>()>& begin);

 private:
  class Small;

  void finish(const Small& wanted);

  std::mutex mutex_;                            // guards everything below
  std::condition_variable changed_;             // an all_reduce is finished
  std::deque<std::shared_ptr<Small>> started_;  // unfinished ones, oldest first
  bool is_worked_on_ = false;                   // a thread is finishing the oldest one
};

}  // namespace fulgur
