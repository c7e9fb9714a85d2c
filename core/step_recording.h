#pragma once

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

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
// NotRecordable; what else a step does on the host nobody notices. In a rehearsal the step runs as usual, and the first
// such function is noted.
class StepRecording {
 public:
  enum class Kind { recording, rehearsal };

  explicit StepRecording(c10::Device device, Kind kind = Kind::recording);
  StepRecording(const StepRecording&) = delete;
  StepRecording& operator=(const StepRecording&) = delete;

  // The one of this thread, or of the thread whose backward this thread runs; null: there is none.
  static StepRecording* current();

  // If there is a current one, throws NotRecordable with the text that what() returns, or notes it in a rehearsal.
  template <class What>
  static void refuse(const What& what) {
    if (StepRecording* recording = current()) recording->refuse(std::string(what()));
  }

  c10::Device device() const { return device_; }  // where the step runs
  bool is_rehearsal() const { return kind_ == Kind::rehearsal; }
  const std::string& refusal() const { return refusal_; }  // of a rehearsal; empty: the step can be recorded
  void after_each_replay(std::function<void()> action) { actions_.push_back(std::move(action)); }
  std::vector<std::function<void()>> take_actions() { return std::exchange(actions_, {}); }

 private:
  struct Info;

  void refuse(const std::string& reason);

  const c10::Device device_;
  const Kind kind_;
  std::string refusal_{};
  std::vector<std::function<void()>> actions_{};
  const c10::DebugInfoGuard guard_;
};

}  // namespace fulgur
