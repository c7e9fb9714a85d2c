#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace fulgur {

// Threads that run jobs, which begin in the order in which they were given: with one thread, the default, one after
// another. The destructor lets the running jobs end and drops the others.
class JobQueue {
 public:
  JobQueue() : JobQueue(1, {}) {}

  // Each thread calls `prepare` before its first job, one thread after the other. The constructor returns when all
  // threads are prepared. Throws std::system_error if the system has no further thread.
  JobQueue(size_t num_threads, const std::function<void()>& prepare);
  ~JobQueue();
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;

  // The future throws what the job throws; std::future_error if it was dropped.
  std::shared_future<void> run(std::function<void()> job);

 private:
  void loop(const std::function<void()>& prepare);
  void stop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> jobs_;
  bool stop_ = false;
  size_t num_prepared_ = 0;  // threads
  std::vector<std::thread> threads_;
};

// Runs part(0), ... part(num_parts - 1) on the threads of the queue. Returns when all have ended. If parts throw, it
// throws the error of the one with the lowest number.
void run_parts(JobQueue& threads, int64_t num_parts, const std::function<void(int64_t)>& part);

}  // namespace fulgur
