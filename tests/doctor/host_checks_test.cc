#include "fulgur/doctor/host_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/testing/temp_dir.h"

namespace fulgur::doctor {
namespace {

using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

class HostChecks : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    const auto path = dir_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  Check of(const std::string& topic, EnvironmentVariables variables = {}) {
    const Checks checks = check_host({.proc = dir_.path() / "proc",
                                      .cgroup = dir_.path() / "cgroup",
                                      .infiniband = dir_.path() / "infiniband",
                                      .folder = folder_,
                                      .open_files = open_files_,
                                      .locked_memory = locked_memory_,
                                      .variables = variables});
    const auto check = std::ranges::find(checks, topic, &Check::topic);
    return check == checks.end() ? Check{} : *check;
  }

  testing::TempDir dir_;
  std::filesystem::path folder_ = dir_.path();
  rlimit open_files_{.rlim_cur = 20000, .rlim_max = 20000};
  rlimit locked_memory_{.rlim_cur = 65536, .rlim_max = 65536};
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

TEST_F(HostChecks, CachedFilesThatNobodyReadsAreFreeMemory) {
  write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n");
  write("cgroup/memory.max", "8589934592\n");
  write("cgroup/memory.current", "8589934592\n");
  write("cgroup/memory.stat", "anon 4294967296\nfile 4294967296\nactive_file 1073741824\ninactive_file 3221225472\n");
  EXPECT_THAT(of("memory").found, HasSubstr("limited to 8.0 GiB by the control group, of which 3.0 are free"));
  EXPECT_EQ(of("memory").verdict, Verdict::good);
}

TEST_F(HostChecks, TheTightestLimitOfAControlGroupAndThoseAroundItCounts) {
  write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n");
  write("proc/self/cgroup", "0::/system.slice/job_7/step_0\n");
  write("cgroup/system.slice/memory.max", "17179869184\n");
  write("cgroup/system.slice/memory.current", "16106127360\n");
  write("cgroup/system.slice/job_7/memory.max", "4294967296\n");
  write("cgroup/system.slice/job_7/memory.current", "1073741824\n");
  write("cgroup/system.slice/job_7/step_0/memory.max", "max\n");
  write("cgroup/other/memory.max", "1024\n");
  EXPECT_THAT(of("memory").found, HasSubstr("limited to 4.0 GiB by the control group, of which 1.0 are free"));

  write("cgroup/system.slice/cpu.max", "50000 100000\n");
  write("cgroup/system.slice/job_7/cpu.max", "25000 100000\n");
  write("cgroup/system.slice/job_7/step_0/cpu.max", "max 100000\n");
  EXPECT_THAT(of("processor").found, HasSubstr("grants the time of 0.25"));
}

TEST_F(HostChecks, ControlGroupsOfVersion1HaveATreeForEachController) {
  write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n");
  write("proc/self/cgroup",
        "11:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm/job_8\n1:name=systemd:/a:b\n0::/init.scope\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(of("memory").found, "32.0 GiB, 16.0 free");
  EXPECT_EQ(of("processor").verdict, Verdict::good);

  write("cgroup/memory/slurm/job_7/memory.limit_in_bytes", "4294967296\n");
  write("cgroup/memory/slurm/job_7/memory.usage_in_bytes", "4294967296\n");
  write("cgroup/memory/slurm/job_7/memory.stat", "inactive_file 0\ntotal_inactive_file 3221225472\n");
  EXPECT_THAT(of("memory").found, HasSubstr("limited to 4.0 GiB by the control group, of which 3.0 are free"));
  write("cgroup/cpu/slurm/job_7/cpu.cfs_quota_us", "10000\n");
  write("cgroup/cpu/slurm/job_7/cpu.cfs_period_us", "100000\n");
  write("cgroup/cpu/slurm/job_8/cpu.cfs_quota_us", "50000\n");
  write("cgroup/cpu/slurm/job_8/cpu.cfs_period_us", "100000\n");
  EXPECT_THAT(of("processor").found, HasSubstr("grants the time of 0.5"));
}

TEST_F(HostChecks, TheRootOfAContainersTreeHasItsLimits) {
  write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n");
  write("proc/self/cgroup", "4:memory:/docker/0123\n");  // a folder that only the host has
  write("cgroup/memory/memory.limit_in_bytes", "4294967296\n");
  write("cgroup/memory/memory.usage_in_bytes", "1073741824\n");
  EXPECT_THAT(of("memory").found, HasSubstr("limited to 4.0 GiB by the control group, of which 3.0 are free"));
}

TEST_F(HostChecks, TheLimitOfOpenFilesIsRaisedByWhoeverCan) {
  EXPECT_EQ(of("open files").verdict, Verdict::good);
  EXPECT_EQ(of("open files").found, "at most 20000");
  open_files_ = {.rlim_cur = 256, .rlim_max = 4096};
  EXPECT_EQ(of("open files").verdict, Verdict::warning);
  EXPECT_THAT(of("open files").advice, HasSubstr("write ulimit -n 1024"));
  open_files_ = {.rlim_cur = 256, .rlim_max = 512};
  EXPECT_THAT(of("open files").advice, HasSubstr("write ulimit -n 512"));
  open_files_ = {.rlim_cur = 512, .rlim_max = 512};
  EXPECT_EQ(of("open files").verdict, Verdict::warning);
  EXPECT_THAT(of("open files").advice, HasSubstr("only root can raise this limit"));
}

TEST_F(HostChecks, LockedMemoryCountsWhereThereIsInfiniBand) {
  EXPECT_EQ(of("locked memory").verdict, Verdict::good);
  write("infiniband/mlx5_0/node_type", "1: CA\n");
  EXPECT_EQ(of("locked memory").verdict, Verdict::warning);
  EXPECT_THAT(of("locked memory").advice, HasSubstr("only root can lift this limit"));
  locked_memory_.rlim_max = RLIM_INFINITY;
  EXPECT_THAT(of("locked memory").advice, HasSubstr("write ulimit -l unlimited"));
  locked_memory_.rlim_cur = RLIM_INFINITY;
  EXPECT_EQ(of("locked memory").verdict, Verdict::good);
  EXPECT_EQ(of("locked memory").found, "unlimited");
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

TEST_F(HostChecks, AFolderThatIsNotThereYetIsMadeOnTheDiskOfItsParent) {
  EXPECT_THAT(of("disk").found, EndsWith("GiB free in " + dir_.path().string()));
  folder_ = dir_.path() / "missing/too";
  EXPECT_THAT(of("disk").found, EndsWith("GiB free in " + dir_.path().string()));
}

// Without a GPU, too: a build has these libraries wherever it runs.
TEST_F(HostChecks, LibrariesOfCudaHaveTheirVersions) {
  const std::string found = of("libraries").found;
  EXPECT_THAT(found, HasSubstr("libtorch " TORCH_VERSION));
#ifdef FULGUR_HAS_CUDA
  EXPECT_THAT(
      found, ContainsRegex(" with CUDA [1-9][0-9]*\\.[0-9]+, cuDNN [1-9]\\.[0-9]+\\.[0-9]+, NCCL 2\\.[0-9]+\\.[0-9]+"));
#else
  EXPECT_THAT(found, Not(HasSubstr("CUDA")));
#endif
}

TEST_F(HostChecks, ThreadsSayWhereTheirNumberComesFrom) {
  EXPECT_THAT(of("threads").found, HasSubstr("OMP_NUM_THREADS is not set"));
  EXPECT_THAT(of("threads", {{"OMP_NUM_THREADS", "3"}}).found, HasSubstr("OMP_NUM_THREADS=3"));
}

}  // namespace
}  // namespace fulgur::doctor
