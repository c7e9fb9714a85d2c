#include "fulgur/base/crc32.h"

#include <gtest/gtest.h>

#include <string>

namespace fulgur {
namespace {

// The check value of both catalogues is that of "123456789"; the others are from RFC 3720, B.4.
TEST(Crc32, HasTheValuesOfItsStandards) {
  EXPECT_EQ(crc32("123456789"), 0xCBF43926);
  EXPECT_EQ(crc32(""), 0U);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AA);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43);
  std::string ascending;
  for (char byte = 0; byte < 32; ++byte) ascending += byte;
  EXPECT_EQ(crc32c(ascending), 0x46DD794E);
}

}  // namespace
}  // namespace fulgur
