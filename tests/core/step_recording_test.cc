#include "fulgur/core/step_recording.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

std::string refuse() { return "a metric is updated"; }

TEST(StepRecording, RefusesOnlyWhileItExists) {
  StepRecording::refuse(refuse);
  {
    const StepRecording recording(c10::kCPU);
    EXPECT_EQ(testing::message_of<NotRecordable>([] { StepRecording::refuse(refuse); }), refuse());
  }
  EXPECT_EQ(StepRecording::current(), nullptr);
  StepRecording::refuse(refuse);
}

TEST(StepRecording, ARehearsalNotesTheFirstRefusal) {
  const StepRecording rehearsal(c10::kCPU, StepRecording::Kind::rehearsal);
  EXPECT_EQ(rehearsal.refusal(), "");
  StepRecording::refuse(refuse);
  StepRecording::refuse([] { return "a number is logged"; });
  EXPECT_EQ(rehearsal.refusal(), refuse());
}

// Backward of a GPU runs on a thread of autograd, to which torch hands the state of the thread that called it.
TEST(StepRecording, ReachesTheThreadsOfBackward) {
  const StepRecording recording(c10::kCPU);
  const at::ThreadLocalState of_caller;
  const StepRecording *in_backward = nullptr, *elsewhere = &recording;
  std::thread([&] {
    elsewhere = StepRecording::current();
    const at::ThreadLocalStateGuard handed_over(of_caller);
    in_backward = StepRecording::current();
  }).join();
  EXPECT_EQ(in_backward, &recording);
  EXPECT_EQ(elsewhere, nullptr);
}

}  // namespace
}  // namespace fulgur
