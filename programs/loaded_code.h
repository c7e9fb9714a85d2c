#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace torch::inductor {
class AOTIModelContainerRunner;
}  // namespace torch::inductor

namespace fulgur {

// Native code that PackedCode has loaded.
class LoadedCode {
 public:
  using Runner = torch::inductor::AOTIModelContainerRunner;

  // `num_models`: how many copies of the model `runner` was made with; with one, it is run by one thread at a time.
  LoadedCode(std::unique_ptr<Runner> runner, size_t num_models);
  ~LoadedCode();

  // Runs the code once. If it was loaded for several threads, any number of them may call; some may have to wait.
  std::vector<at::Tensor> run(std::vector<at::Tensor>&& inputs);

  // Calls `exchange` when the runs that have begun have ended; no other begins until it returns. For code that was
  // loaded for several threads.
  void between_runs(const std::function<void()>& exchange);

  Runner& runner() { return *runner_; }

 private:
  class Turn;  // a scope in which a thread runs the code

  const std::unique_ptr<Runner> runner_;

  // No more threads run the code at once than it has models. AOTInductor's container could wait forever when it is new
  // or has other weights: a thread that has a model waits until the others are done, and one without waits for it.
  const size_t num_models_;
  std::mutex mutex_;
  std::condition_variable changed_;  // notified when one of the two below changes
  size_t num_running_ = 0;
  bool is_exchanging_ = false;  // no run begins
};

}  // namespace fulgur
