#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fulgur {

// Thrown by what the host would have to do again in each step, such as updating a metric; what() says it.
struct NotRecordable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While it exists, a training step of this thread is being recorded as a CUDA graph, whose replays run the kernels of
// the step but no code of the host. What the host may as well do after each replay is noted here, such as logging a
// tensor that the replay has written. Functions of Module and Metric that it would have to call within the step throw
// NotRecordable; what else a step does on the host nobody notices.
class StepRecording {
 public:
  explicit StepRecording(c10::Device device);
  ~StepRecording();
  StepRecording(const StepRecording&) = delete;
  StepRecording& operator=(const StepRecording&) = delete;

  static StepRecording* current();  // null: no step of this thread is being recorded

  // Throws NotRecordable with the text that what() returns if a step of this thread is being recorded.
  template <class What>
  static void refuse(const What& what) {
    if (current() != nullptr) throw NotRecordable(what());
  }

  c10::Device device() const { return device_; }  // where the step runs
  void after_each_replay(std::function<void()> action) { actions_.push_back(std::move(action)); }
  std::vector<std::function<void()>> take_actions() { return std::exchange(actions_, {}); }

 private:
  const c10::Device device_;
  std::vector<std::function<void()>> actions_{};
};

}  // namespace fulgur
