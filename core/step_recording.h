#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fulgur {

// Thrown by what a training step does that the host would have to do again in each step; what() says it.
struct NotRecordable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While it exists, a training step of this thread is being recorded as a CUDA graph, whose replays run the kernels of
// the step but no code of the host. What may be done by the host after each replay is noted here, such as logging a
// tensor that each replay writes; the rest throws NotRecordable.
class StepRecording {
 public:
  explicit StepRecording(c10::Device device);
  ~StepRecording();
  StepRecording(const StepRecording&) = delete;
  StepRecording& operator=(const StepRecording&) = delete;

  static StepRecording* current();  // null: no step of this thread is being recorded

  // Throws NotRecordable if a step of this thread is being recorded: "the metric Accuracy is updated".
  static void refuse(const std::string& what);

  c10::Device device() const { return device_; }  // where the step runs
  void after_each_replay(std::function<void()> action) { actions_.push_back(std::move(action)); }
  std::vector<std::function<void()>> take_actions() { return std::exchange(actions_, {}); }

 private:
  const c10::Device device_;
  std::vector<std::function<void()>> actions_{};
};

}  // namespace fulgur
