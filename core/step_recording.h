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

// Thrown while a step is being recorded, by a function that the host would have to repeat at each replay, such as the
// update of a metric. what() says which one.
struct NotRecordable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While an object exists, the training step of its thread is being recorded as a CUDA graph. A replay launches the
// kernels of the step and runs no code of the host. Host work that can follow each replay, such as logging a tensor
// that the replay has written, is registered by after_each_replay(). Functions of Module and Metric that would have to
// run within the step throw NotRecordable; any other host code is silently left out of replays. A rehearsal records
// nothing: the step runs as usual, and refusal() is the first reason for which a recording would throw. Threading: the
// threads of the step's backward may call members, too.
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
