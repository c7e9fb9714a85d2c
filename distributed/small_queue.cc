#include "fulgur/distributed/small_queue.h"

#include <exception>
#include <utility>

namespace fulgur {

class SmallQueue::Small final : public SmallAllReduce {
 public:
  Small(SmallQueue& queue, std::function<void()> rest) : queue_(queue), rest_(std::move(rest)) {}

  bool is_sent() const override { return false; }
  void finish() override { queue_.finish(*this); }

 private:
  friend class SmallQueue;

  SmallQueue& queue_;
  std::function<void()> rest_;
  bool is_finished_ = false;
  std::exception_ptr error_{};
};

std::shared_ptr<SmallAllReduce> SmallQueue::start(const std::function<std::function<void()>()>& begin) {
  const std::lock_guard lock(mutex_);
  return started_.emplace_back(std::make_shared<Small>(*this, begin()));
}

// No lock is held while waiting for other ranks: a thread whose all_reduce another thread has finished goes on, as
// other ranks may be waiting for what it does next.
void SmallQueue::finish(const Small& wanted) {
  std::unique_lock lock(mutex_);
  while (!wanted.is_finished_) {
    if (is_worked_on_) {
      changed_.wait(lock);
      continue;
    }
    is_worked_on_ = true;
    const std::shared_ptr<Small> oldest = started_.front();
    lock.unlock();
    std::exception_ptr error;
    try {
      std::exchange(oldest->rest_, nullptr)();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    is_worked_on_ = false;
    started_.pop_front();
    oldest->is_finished_ = true;
    oldest->error_ = error;
    changed_.notify_all();
  }
  if (wanted.error_ != nullptr) std::rethrow_exception(wanted.error_);
}

}  // namespace fulgur
