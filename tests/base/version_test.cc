#include "fulgur/base/version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;

TEST(Version, HasThreeNumbers) {
  EXPECT_EQ(version(), FULGUR_VERSION);
  EXPECT_EQ(std::to_string(FULGUR_VERSION_MAJOR) + "." + std::to_string(FULGUR_VERSION_MINOR) + "." +
                std::to_string(FULGUR_VERSION_PATCH),
            FULGUR_VERSION);
}

TEST(Version, HeadersOfAnotherPatchFit) {
  const std::string minor = std::to_string(FULGUR_VERSION_MAJOR) + "." + std::to_string(FULGUR_VERSION_MINOR);
  EXPECT_TRUE(internal::check_version(minor + ".0"));
  EXPECT_TRUE(internal::check_version(minor + ".1234"));
}

TEST(Version, HeadersOfAnotherMinorVersionAreRefusedByName) {
  const std::string message = testing::message_of<UsageError>([] { internal::check_version("0.999.0"); });
  EXPECT_THAT(message, HasSubstr("the headers of fulgur 0.999.0"));
  EXPECT_THAT(message, HasSubstr("the library of fulgur " FULGUR_VERSION));
}

}  // namespace
}  // namespace fulgur
