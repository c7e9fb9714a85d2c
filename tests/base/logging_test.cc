#include "fulgur/base/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace fulgur
