#include "fulgur/reports/terminal_text.h"

#include <gtest/gtest.h>

#include <string>

namespace fulgur {
namespace {

TEST(TerminalText, ControlCharactersBecomeQuestionMarks) {
  EXPECT_EQ(terminal_text("a\x1b[2J\n\t\x7f"), "a?[2J???");
  EXPECT_EQ(terminal_text("\xc2\x80\xc2\x9b\xc2\x9f"), "???");  // U+0080, U+009B and U+009F are the C1 controls
  EXPECT_EQ(terminal_text(std::string_view("a\0b", 3)), "a?b");
}

TEST(TerminalText, BytesThatAreNoUtf8BecomeQuestionMarks) {
  EXPECT_EQ(terminal_text("\x9b\xff"
                          "a\xe6\x90"),
            "??a??");
  EXPECT_EQ(terminal_text("\xc0\xaf"), "??");            // an overlong slash
  EXPECT_EQ(terminal_text("\xed\xa0\x80"), "???");       // a surrogate
  EXPECT_EQ(terminal_text("\xf4\x90\x80\x80"), "????");  // beyond U+10FFFF
}

TEST(TerminalText, WideCharactersTakeTwoColumns) {
  EXPECT_EQ(columns_of("loss"), 4u);
  EXPECT_EQ(columns_of("\u00e9\u2588"), 2u);
  EXPECT_EQ(columns_of("\u635f\u5931"), 4u);
  EXPECT_EQ(columns_of("\U0001f680"), 2u);
  EXPECT_EQ(columns_of("e\u0301"), 1u);  // an accent that combines
}

TEST(TerminalText, ATextIsCutBetweenCharacters) {
  EXPECT_EQ(terminal_text("\u635f\u5931", 3), "\u635f");
  EXPECT_EQ(terminal_text("\u635f", 1), "");
  EXPECT_EQ(terminal_text("e\u0301x", 1), "e\u0301");
  EXPECT_EQ(padded("\u635f\u5931", 3), "\u635f ");
  EXPECT_EQ(padded("a", 3), "a  ");
}

}  // namespace
}  // namespace fulgur
