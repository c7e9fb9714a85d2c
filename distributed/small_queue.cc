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

std::shared_ptr<SmallQueue::Small> SmallQueue::take_oldest() {
  const std::lock_guard lock(mutex_);
  auto oldest = std::move(started_.front());
  started_.pop_front();
  return oldest;
}

void SmallQueue::finish(const Small& wanted) {
  const std::lock_guard lock(finishing_);
  while (!wanted.is_finished_) {
    const std::shared_ptr<Small> oldest = take_oldest();
    try {
      std::exchange(oldest->rest_, nullptr)();
    } catch (...) {
      oldest->error_ = std::current_exception();
    }
    oldest->is_finished_ = true;
  }
  if (wanted.error_ != nullptr) std::rethrow_exception(wanted.error_);
}

}  // namespace fulgur
