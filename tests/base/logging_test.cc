#include "fulgur/base/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

class LoggingTest : public ::testing::Test {
 protected:
  ~LoggingTest() override { set_log_rank(0, 1); }

  static std::string written_by(int64_t rank, int64_t world_size) {
    set_log_rank(rank, world_size);
    ::testing::internal::CaptureStderr();
    log_info("epoch {}", 3);
    log_warning("slow");
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LoggingTest, AloneThereIsNoRank) { EXPECT_EQ(written_by(0, 1), "epoch 3\nwarning: slow\n"); }

TEST_F(LoggingTest, OneOfManySaysWhichAndOnlyRank0Informs) {
  EXPECT_EQ(written_by(0, 2), "[rank 0] epoch 3\n[rank 0] warning: slow\n");
  EXPECT_EQ(written_by(1, 2), "[rank 1] warning: slow\n");
}

TEST_F(LoggingTest, WhoeverDrewALineIsCalledBeforeEachOne) {
  int calls = 0;
  {
    const ScopedBeforeLogLine before([&] { ++calls; });
    EXPECT_EQ(written_by(0, 1), "epoch 3\nwarning: slow\n");
    EXPECT_EQ(calls, 2);
  }
  written_by(0, 1);
  EXPECT_EQ(calls, 2);
}

TEST_F(LoggingTest, LevelsLeaveOutWhatIsBelowThem) {
  set_log_level(LogLevel::warning);
  EXPECT_EQ(written_by(0, 1), "warning: slow\n");
  set_log_level(LogLevel::error);
  EXPECT_EQ(written_by(0, 1), "");
  ::testing::internal::CaptureStderr();
  internal::write_error("[rank 1] ", "lost");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "[rank 1] error: lost\n");
  set_log_level(LogLevel::info);
}

TEST_F(LoggingTest, AFileGetsWholeLinesOfAllThatIsPrinted) {
  const testing::TempDir dir;
  const std::string path = dir.path() / "log.txt";
  const auto text = [&] {
    std::stringstream read;
    read << std::ifstream(path).rdbuf();
    return read.str();
  };
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  copy_output_to(path);
  std::cout << "one\nEpoch 1  50%\rEpoch 1 100%" << std::flush;
  log_warning("slow");
  EXPECT_EQ(text(), "one\nwarning: slow\n");  // a line is written when it is whole
  std::cout << "\nwindows\r\n";
  std::cerr << "bad " << 7 << '\n';
  copy_output_to("");
  std::cout << "not any more\n";
  log_warning("nor this");
  EXPECT_EQ(text(), "one\nwarning: slow\nEpoch 1 100%\nwindows\nbad 7\n");
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "one\nEpoch 1  50%\rEpoch 1 100%\nwindows\r\nnot any more\n");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "warning: slow\nbad 7\nwarning: nor this\n");

  copy_output_to(path);  // appends
  std::cerr << "again\n";
  copy_output_to("");
  EXPECT_THAT(text(), ::testing::EndsWith("bad 7\nagain\n"));
  EXPECT_THROW(copy_output_to(dir.path() / "no/log.txt"), std::runtime_error);
}

TEST_F(LoggingTest, LinesOfSeveralThreadsStayWhole) {
  const testing::TempDir dir;
  const std::string path = dir.path() / "log.txt";
  ::testing::internal::CaptureStderr();
  copy_output_to(path);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int line = 0; line < 200; ++line) log_warning("the same line from all of them");
    });
  }
  for (std::thread& thread : threads) thread.join();
  copy_output_to("");
  ::testing::internal::GetCapturedStderr();
  std::ifstream file(path);
  int64_t num_lines = 0;
  for (std::string line; std::getline(file, line); ++num_lines) {
    ASSERT_EQ(line, "warning: the same line from all of them");
  }
  EXPECT_EQ(num_lines, 800);
}

}  // namespace
}  // namespace fulgur
