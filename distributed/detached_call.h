#pragma once

#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace fulgur {

// Runs `call` on a new thread, which keeps running if the future is dropped: for calls that may block where no timeout
// applies, such as those to a store whose process has been stopped. `call` must own everything that it uses.
template <class Result>
std::future<Result> detached_call(std::function<Result()> call) {
  std::packaged_task<Result()> task(std::move(call));
  std::future<Result> result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

}  // namespace fulgur
