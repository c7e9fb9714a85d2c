#include "fulgur/device/devices.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::message_of;

std::string refusal(std::string_view accelerator, const Devices& devices) {
  return message_of<UsageError>([&] { resolve_devices(accelerator, devices); });
}

TEST(Devices, ConvertFromWhatPeopleWrite) {
  EXPECT_EQ(Devices(4).count(), 4);
  EXPECT_EQ(Devices(size_t{4}).count(), 4);
  EXPECT_EQ(Devices("4").count(), 4);
  EXPECT_EQ(Devices({0, 2}).indices(), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(Devices("0,2").indices(), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(Devices("2,").indices(), (std::vector<int64_t>{2}));
  EXPECT_FALSE(Devices("auto").count() || Devices("auto").indices());
}

TEST(Devices, TextOfThemGivesThemBack) {
  for (const char* text : {"auto", "4", "0,2", "2,"}) EXPECT_EQ(Devices(text).to_string(), text);
}

TEST(Devices, RefuseOtherText) {
  for (const char* text : {"", "four", "1,x", "1.5", ",", "0,,2"}) {
    EXPECT_THAT(message_of<UsageError>([&] { Devices devices(text); }), HasSubstr("is not a count")) << text;
  }
}

TEST(Devices, AutoIsOneCpuDevice) {
  EXPECT_EQ(resolve_devices("cpu", "auto"), std::vector<c10::Device>{c10::kCPU});
  EXPECT_EQ(resolve_devices("cpu", 3).size(), 3U);
}

TEST(Devices, RefuseNoneTooManyAndDuplicates) {
  EXPECT_THAT(refusal("cpu", 0), HasSubstr("at least 1 is needed; got 0"));
  EXPECT_THAT(refusal("cpu", -1), HasSubstr("got -1"));
  EXPECT_THAT(refusal("cpu", std::vector<int64_t>{}), HasSubstr("the list is empty"));
  EXPECT_THAT(refusal("cpu", 5000), HasSubstr("5000 were asked for"));
  EXPECT_THAT(refusal("cpu", {1, 1}), HasSubstr("listed twice"));
  EXPECT_THAT(refusal("cpu", {0, 5000}), HasSubstr("there is no cpu:5000"));
}

TEST(Devices, WithoutAGpuTheMessageSaysWhatKeepsItFromBeingUsed) {
  if (at::hasCUDA()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(refusal("cuda", "auto"), AnyOf(HasSubstr("(there is no NVIDIA driver)"), HasSubstr("(the program was"),
                                             HasSubstr("(the NVIDIA driver is for"), HasSubstr("CUDA says: ")));
  EXPECT_THAT(refusal("cuda", "auto"), HasSubstr("write 'cpu'"));
}

TEST(Devices, RefuseAnAcceleratorThatDoesNotExist) {
  EXPECT_THAT(refusal("gpuu", "auto"), HasSubstr("did you mean 'gpu'?"));
}

}  // namespace
}  // namespace fulgur
