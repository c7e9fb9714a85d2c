#include "fulgur/core/step_recording.h"

#include <c10/util/Exception.h>

#include <memory>

namespace fulgur {
namespace {

// Autograd, which runs backward of a GPU on a thread of its own, takes along what is kept under the kinds that libtorch
// knows. This one is for tests of libtorch itself.
constexpr auto kKind = c10::DebugInfoKind::TEST_INFO;

}  // namespace

struct StepRecording::Info : c10::DebugInfoBase {
  explicit Info(StepRecording* of) : recording(of) {}
  StepRecording* const recording;
};

StepRecording::StepRecording(c10::Device device, Kind kind)
    : device_(device), kind_(kind), guard_(kKind, std::make_shared<Info>(this)) {}

StepRecording* StepRecording::current() {
  auto* const info = static_cast<Info*>(c10::ThreadLocalDebugInfo::get(kKind));
  return info == nullptr ? nullptr : info->recording;
}

void StepRecording::refuse(const std::string& reason) {
  if (!is_rehearsal()) throw NotRecordable(reason);
  if (refusal_.empty()) refusal_ = reason;
}

}  // namespace fulgur
