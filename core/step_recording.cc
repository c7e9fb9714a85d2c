#include "fulgur/core/step_recording.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <utility>

namespace fulgur {
namespace {

// Autograd, which runs backward of a GPU on a thread of its own, takes along what is kept under the kinds that libtorch
// knows. This one is for tests of libtorch itself.
constexpr auto kSlot = c10::DebugInfoKind::TEST_INFO;

}  // namespace

// Work that was begun within the step may keep this for longer than the recording lives.
struct StepRecording::Info : c10::DebugInfoBase {
  std::atomic<StepRecording*> recording = nullptr;
};

StepRecording::StepRecording(c10::Device device, Kind kind)
    : device_(device), kind_(kind), info_(std::make_shared<Info>()), guard_(kSlot, info_) {
  info_->recording = this;
}

StepRecording::~StepRecording() { info_->recording = nullptr; }

StepRecording* StepRecording::current() {
  auto* const info = static_cast<Info*>(c10::ThreadLocalDebugInfo::get(kSlot));
  return info == nullptr ? nullptr : info->recording.load();
}

std::string StepRecording::refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

void StepRecording::after_each_replay(std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  actions_.push_back(std::move(action));
}

std::vector<std::function<void()>> StepRecording::take_actions() {
  const std::lock_guard lock(mutex_);
  return std::exchange(actions_, {});
}

void StepRecording::throw_or_note(const std::string& reason) {
  if (!is_rehearsal()) throw NotRecordable(reason);
  const std::lock_guard lock(mutex_);
  if (refusal_.empty()) refusal_ = reason;
}

}  // namespace fulgur
