#include "fulgur/base/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace fulgur {
namespace {

TEST(Utf8, TakesTheFirstAndLastCharacterOfEachLength) {
  for (const std::string text : {"", "plain", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
                                 "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(is_utf8(text + "a" + text));
  }
  EXPECT_TRUE(is_utf8(std::string_view("\0", 1)));
}

TEST(Utf8, RefusesWhatRfc3629Refuses) {
  for (const std::string text : {"caf\xe9",                                          // Latin-1
                                 "\x80", "\xbf",                                     // a tail without its lead
                                 "\xc3", "\xe2\x82", "\xf0\x9f\x98",                 // cut off
                                 "\xc0\x80", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",     // overlong
                                 "\xed\xa0\x80",                                     // a surrogate
                                 "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {  // above U+10FFFF
    EXPECT_FALSE(is_utf8(text));
    EXPECT_FALSE(is_utf8("a" + text + "a"));
  }
}

}  // namespace
}  // namespace fulgur
