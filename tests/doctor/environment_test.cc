#include "fulgur/doctor/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

namespace fulgur::doctor {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Environment, HasALineForEachCheckThatNeedsNoWaiting) {
  setenv("FULGUR_SOCKET_IFNAME", "eth77", /*overwrite=*/1);
  const auto environment = describe_environment(".");
  unsetenv("FULGUR_SOCKET_IFNAME");
  EXPECT_EQ(environment.at("process"), getpid());
  for (const char* topic : {"processor", "memory", "open files", "disk", "launcher"}) {
    EXPECT_TRUE(environment.at(topic).is_string()) << topic;
  }
  const std::string interfaces = environment.at("interfaces");
  EXPECT_THAT(interfaces, StartsWith("problem: "));
  EXPECT_THAT(interfaces, HasSubstr("; set FULGUR_SOCKET_IFNAME to one of these interfaces"));
}

}  // namespace
}  // namespace fulgur::doctor
