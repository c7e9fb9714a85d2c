#pragma once

#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace fulgur {

// Runs `call` on a thread of its own, which is left behind if nobody waits for the future: for calls that may block
// where no timeout reaches them, such as those to a store whose process has been stopped. `call` must own what it uses.
template <class Result>
std::future<Result> detached_call(std::function<Result()> call) {
  std::packaged_task<Result()> task(std::move(call));
  std::future<Result> result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

}  // namespace fulgur
