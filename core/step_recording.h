#pragma once

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <mutex>
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
// NotRecordable; what else a step does on the host nobody notices. In a rehearsal nothing is recorded: the step runs as
// usual, and the first such function is noted. Threading: threads of backward may call while the one that has made it
// waits for them.
class StepRecording {
 public:
  enum class Kind { recording, rehearsal };

  explicit StepRecording(c10::Device device, Kind kind = Kind::recording);
  ~StepRecording();
  StepRecording(const StepRecording&) = delete;
  StepRecording& operator=(const StepRecording&) = delete;

  // The one of this thread, or of the thread whose backward this thread runs; null: there is none.
  static StepRecording* current();

  // If there is a current one, throws NotRecordable with the text that what() returns, or notes it in a rehearsal.
  template <class What>
  static void refuse(const What& what) {
    if (StepRecording* recording = current()) recording->throw_or_note(std::string(what()));
  }

  c10::Device device() const { return device_; }  // where the step runs
  bool is_rehearsal() const { return kind_ == Kind::rehearsal; }
  std::string refusal() const;  // what a rehearsal has noted; empty: nothing
  void after_each_replay(std::function<void()> action);
  std::vector<std::function<void()>> take_actions();

 private:
  struct Info;

  void throw_or_note(const std::string& reason);

  const c10::Device device_;
  const Kind kind_;
  mutable std::mutex mutex_;
  std::string refusal_{};
  std::vector<std::function<void()>> actions_{};
  const std::shared_ptr<Info> info_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace fulgur
