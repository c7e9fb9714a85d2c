// Code in an archive that this process does not run, and why.
#include "fulgur/programs/packed_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "fulgur/base/compiled_code.h"
#include "fulgur/base/error.h"
#include "fulgur/programs/archive_entries.h"
#include "fulgur/programs/loaded_code.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;

constexpr const char* kLibrary = "data/aotinductor/model/net.wrapper.so";
constexpr const char* kMetadata = "data/aotinductor/model/net.wrapper_metadata.json";

std::string why_not(std::string_view metadata, c10::Device device = c10::kCPU) {
  return PackedCode("a.pt2", {{kLibrary, "code"}, {kMetadata, metadata}}, "model").why_not_on(device);
}

TEST(PackedCode, SaysWhatItWasCompiledFor) {
  EXPECT_EQ(why_not(R"({"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "INVALID_VEC_ISA"})"), "");
  EXPECT_EQ(why_not(R"({"AOTI_DEVICE_KEY": "cpu"})", c10::Device(c10::kCUDA, 1)),
            "was compiled for cpu, but is to run on cuda:1");
  EXPECT_EQ(why_not(R"({"AOTI_DEVICE_KEY": "cuda"})"), "was compiled for cuda, but is to run on cpu");
  EXPECT_THAT(why_not(R"({"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "riscv64"})"),
              HasSubstr("was compiled for riscv64, but this machine is "));
  EXPECT_EQ(why_not(R"({"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX2 AVX9000"})"),
            "was compiled for processors with AVX9000, which this one does not have: compile it here");
}

TEST(PackedCode, SaysForWhichGpusItWasCompiled) {
  for (const auto [compiled_for, own] :
       {std::pair{80, 80}, {80, 86}, {86, 89}, {90, 90}, {100, 100}, {0, 90}, {90, 0}}) {
    EXPECT_EQ(why_not_on_capability(compiled_for, own), "") << compiled_for << " on " << own;
  }
  for (const auto [compiled_for, own] : {std::pair{86, 80}, {80, 90}, {90, 89}, {90, 100}, {100, 103}, {120, 121}}) {
    EXPECT_NE(why_not_on_capability(compiled_for, own), "") << compiled_for << " on " << own;
  }
  EXPECT_EQ(why_not_on_capability(100, 89),
            "was compiled for GPUs of compute capability 10.0, but this one has 8.9: compile it here");
}

TEST(PackedCode, IsNotRunWhereThatIsNotAllowed) {
  allow_compiled_code(false);
  EXPECT_EQ(why_not(R"({"AOTI_DEVICE_KEY": "cpu"})"),
            "is native code, which is not allowed here (--compiled_code=false)");
  allow_compiled_code(true);
  EXPECT_EQ(why_not(R"({"AOTI_DEVICE_KEY": "cpu"})"), "");
}

TEST(PackedCode, IncompleteCodeIsAnError) {
  const auto error = [](const ArchiveEntries& entries) {
    return testing::message_of<CheckpointError>([&] { PackedCode("a.pt2", entries, "model"); });
  };
  EXPECT_EQ(error({}), "a.pt2: has no compiled code (.so)");
  EXPECT_EQ(error({{"data/aotinductor/model2/net.so", ""}}), "a.pt2: has no compiled code (.so)");
  EXPECT_EQ(error({{kLibrary, "code"}}), "a.pt2: has no compiled code (.wrapper_metadata.json)");
  EXPECT_EQ(error({{kLibrary, "code"}, {"data/aotinductor/model/a.so", "code"}, {kMetadata, "{}"}}),
            "a.pt2: has two files of code, a.so and net.wrapper.so");
  EXPECT_THAT(error({{kLibrary, "code"}, {"data/aotinductor/model/net.blob", "weights"}}),
              HasSubstr("its weights are in a file of their own, net.blob, which is not read"));
  EXPECT_EQ(error({{kLibrary, "code"}, {kMetadata, "{}"}}), "a.pt2: net.wrapper_metadata.json: has no AOTI_DEVICE_KEY");
  EXPECT_THAT(error({{kLibrary, "code"}, {kMetadata, "{"}}), HasSubstr("a.pt2: net.wrapper_metadata.json"));
  EXPECT_THAT(error({{kLibrary, "code"}, {kMetadata, R"({"AOTI_DEVICE_KEY": 3})"}}),
              HasSubstr("a.pt2: net.wrapper_metadata.json"));
}

TEST(PackedCode, WhatIsNoLibraryIsAnError) {
  const ArchiveEntries entries = {{kLibrary, "code"}, {kMetadata, R"({"AOTI_DEVICE_KEY": "cpu"})"}};
  EXPECT_THAT(testing::message_of<CheckpointError>(
                  [&] { PackedCode("a.pt2", entries, "model").load_for_one_thread(c10::kCPU); }),
              HasSubstr("a.pt2: its compiled code cannot be loaded: "));
}

}  // namespace
}  // namespace fulgur
