#include "fulgur/core/step_recording.h"

#include <c10/util/Exception.h>

namespace fulgur {
namespace {

thread_local StepRecording* g_current = nullptr;

}  // namespace

StepRecording::StepRecording(c10::Device device) : device_(device) {
  TORCH_INTERNAL_ASSERT(g_current == nullptr);
  g_current = this;
}

StepRecording::~StepRecording() { g_current = nullptr; }

StepRecording* StepRecording::current() { return g_current; }

}  // namespace fulgur
