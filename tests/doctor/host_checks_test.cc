#include "fulgur/doctor/host_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/testing/temp_dir.h"

namespace fulgur::doctor {
namespace {

using ::testing::HasSubstr;

class HostChecks : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    const auto path = dir_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  Check of(const std::string& topic, EnvironmentVariables variables = {}) {
    const Checks checks = check_host(
        {.proc = dir_.path() / "proc", .cgroup = dir_.path() / "cgroup", .folder = folder_, .variables = variables});
    const auto check = std::ranges::find(checks, topic, &Check::topic);
    return check == checks.end() ? Check{} : *check;
  }

  testing::TempDir dir_;
  std::filesystem::path folder_ = dir_.path();
};

TEST_F(HostChecks, WhatAContainerDoesNotSayIsUnknown) {
  EXPECT_THAT(of("processor").found, HasSubstr("unknown, "));
  const Check memory = of("memory");
  EXPECT_EQ(memory.verdict, Verdict::warning);
  EXPECT_THAT(memory.found, HasSubstr("unknown"));
  EXPECT_THAT(memory.advice, HasSubstr("/proc"));
}

TEST_F(HostChecks, MemoryIsWhatTheControlGroupLeaves) {
  write("proc/meminfo", "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n");
  EXPECT_EQ(of("memory").found, "32.0 GiB, 16.0 free");
  write("cgroup/memory.max", "max\n");
  EXPECT_EQ(of("memory").found, "32.0 GiB, 16.0 free");
  write("cgroup/memory.max", "4294967296\n");
  write("cgroup/memory.current", "3221225472\n");
  const Check limited = of("memory");
  EXPECT_EQ(limited.found, "32.0 GiB, 16.0 free, limited to 4.0 GiB by the control group, of which 1.0 are free");
  EXPECT_EQ(limited.verdict, Verdict::warning);
}

TEST_F(HostChecks, AQuotaBelowTheCoresIsAWarning) {
  write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Abacus 3000\n\nprocessor\t: 1\nmodel name\t: Other\n");
  EXPECT_EQ(of("processor").verdict, Verdict::good);
  EXPECT_THAT(of("processor").found, HasSubstr("Abacus 3000, "));
  write("cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(of("processor").verdict, Verdict::good);
  write("cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(of("processor").verdict, Verdict::warning);
  EXPECT_THAT(of("processor").found, HasSubstr("grants the time of 0.5"));
  EXPECT_THAT(of("processor").advice, HasSubstr("OMP_NUM_THREADS=1"));
}

TEST_F(HostChecks, AGpuOfTheDriverThatIsNotUsableIsAProblemUnlessItIsHidden) {
  EXPECT_EQ(of("GPUs").found, "none");
  write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA Abacus\nIRQ: 1\n");
  EXPECT_EQ(of("GPUs").verdict, Verdict::problem);
  EXPECT_EQ(of("GPUs").found, "0 usable; present: NVIDIA Abacus");
  EXPECT_EQ(of("GPUs", {{"CUDA_VISIBLE_DEVICES", ""}}).verdict, Verdict::good);
}

TEST_F(HostChecks, AFolderThatIsNotThereHasNoDisk) {
  EXPECT_THAT(of("disk").found, HasSubstr("GiB free in " + dir_.path().string()));
  folder_ = dir_.path() / "missing";
  EXPECT_EQ(of("disk").verdict, Verdict::warning);
  EXPECT_THAT(of("disk").found, HasSubstr("unknown for"));
}

TEST_F(HostChecks, ThreadsSayWhereTheirNumberComesFrom) {
  EXPECT_THAT(of("threads").found, HasSubstr("OMP_NUM_THREADS is not set"));
  EXPECT_THAT(of("threads", {{"OMP_NUM_THREADS", "3"}}).found, HasSubstr("OMP_NUM_THREADS=3"));
}

}  // namespace
}  // namespace fulgur::doctor
