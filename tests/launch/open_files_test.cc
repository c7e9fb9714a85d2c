#include "fulgur/launch/open_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace fulgur {
namespace {

rlim_t soft_limit() {
  rlimit limit{};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  return limit.rlim_cur;
}

TEST(AllowOpenFiles, RaisesTheSoftLimitUpToTheHardOne) {
  const rlimit low{.rlim_cur = 64, .rlim_max = 200};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(allow_open_files(50), 64);
  EXPECT_EQ(soft_limit(), 64);
  EXPECT_EQ(allow_open_files(100), 100);
  EXPECT_EQ(soft_limit(), 100);
  EXPECT_EQ(allow_open_files(100000), 200);
  EXPECT_EQ(soft_limit(), 200);
}

}  // namespace
}  // namespace fulgur
