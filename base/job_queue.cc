#include "fulgur/base/job_queue.h"

#include <utility>

namespace fulgur {

JobQueue::JobQueue() : thread_([this] { loop(); }) {}

JobQueue::~JobQueue() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    jobs_.clear();
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_future<void> JobQueue::run(std::function<void()> job) {
  std::packaged_task<void()> task(std::move(job));
  std::shared_future<void> done = task.get_future().share();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(task));
  }
  changed_.notify_all();
  return done;
}

void JobQueue::loop() {
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    std::packaged_task<void()> task = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    task();
  }
}

}  // namespace fulgur
