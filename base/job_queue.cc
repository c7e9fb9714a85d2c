#include "fulgur/base/job_queue.h"

#include <utility>

namespace fulgur {

JobQueue::JobQueue(size_t num_threads, const std::function<void()>& prepare) {
  try {
    while (threads_.size() < num_threads) {
      threads_.emplace_back([this, prepare] { loop(prepare); });
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return num_prepared_ == threads_.size(); });
    }
  } catch (...) {  // the system has no further thread
    stop();
    throw;
  }
}

JobQueue::~JobQueue() { stop(); }

void JobQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    jobs_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_future<void> JobQueue::run(std::function<void()> job) {
  std::packaged_task<void()> task(std::move(job));
  std::shared_future<void> done = task.get_future().share();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(task));
  }
  changed_.notify_one();
  return done;
}

void JobQueue::loop(const std::function<void()>& prepare) {
  if (prepare) prepare();
  std::unique_lock lock(mutex_);
  ++num_prepared_;
  changed_.notify_all();
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    std::packaged_task<void()> task = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    task();
    task = {};
    lock.lock();
  }
}

void run_parts(JobQueue& threads, int64_t num_parts, const std::function<void(int64_t)>& part) {
  std::vector<std::shared_future<void>> done;
  for (int64_t p = 0; p < num_parts; ++p) done.push_back(threads.run([&part, p] { part(p); }));
  for (const auto& one : done) one.wait();  // a part uses what the caller has
  for (const auto& one : done) one.get();
}

}  // namespace fulgur
