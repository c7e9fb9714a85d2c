#include "fulgur/programs/size_guard.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fulgur::program {
namespace {

bool holds(const std::string& text, const std::vector<int64_t>& values) {
  const auto guard = SizeGuard::parse(text);
  if (!guard) {
    ADD_FAILURE() << "not read: " << text;
    return false;
  }
  EXPECT_EQ(guard->text(), text);
  EXPECT_EQ(guard->sizes().size(), values.size()) << text;
  return guard->holds(values);
}

TEST(SizeGuard, ComputesAsPython) {
  const std::string a = "L['x'].size()[0]", b = "L['x'].size()[1]";
  EXPECT_TRUE(holds("(" + a + " % 4) == 0", {8}));
  EXPECT_FALSE(holds("(" + a + " % 4) == 0", {7}));
  EXPECT_TRUE(holds(b + "*" + a + " > 24", {5, 5}));
  EXPECT_FALSE(holds(b + "*" + a + " > 24", {6, 4}));
  EXPECT_TRUE(holds(a + " - 1 - 1 == 5", {7}));
  EXPECT_TRUE(holds(a + " + 2*" + b + " // 4 != 4", {1, 5}));
  EXPECT_TRUE(holds("-" + a + " // 2 == -4", {7}));
  EXPECT_TRUE(holds("-" + a + " % 4 == 1", {7}));
  EXPECT_TRUE(holds(a + " >= 3 and not (" + b + " <= 2 or " + b + " == 9)", {3, 4, 4}));
  EXPECT_FALSE(holds(a + " < 3 or " + b + " < 3", {3, 3}));
}

TEST(SizeGuard, WithoutAValueIsFalse) {
  const std::string a = "L['x'].size()[0]";
  EXPECT_FALSE(holds("(8 % (" + a + " // 2)) == 0", {1}));  // a division by zero
  EXPECT_FALSE(holds(a + "*9223372036854775807 != 0", {3}));
  EXPECT_TRUE(holds(a + " == 1 or 8 % (" + a + " // 2) == 0", {1, 1}));
}

TEST(SizeGuard, NamesInputsAsProgramDoes) {
  const auto guard = SizeGuard::parse("L['pair']['left'].size()[2] == L['xs'][1].size()[0]");
  ASSERT_TRUE(guard);
  ASSERT_EQ(guard->sizes().size(), 2u);
  EXPECT_EQ(guard->sizes()[0].input, "pair.left");
  EXPECT_EQ(guard->sizes()[0].dim, 2u);
  EXPECT_EQ(guard->sizes()[1].input, "xs.1");
}

TEST(SizeGuard, GivesNothingForOtherTexts) {
  const std::string a = "L['x'].size()[0]";
  const std::vector<std::string> texts{"",
                                       "1 == 1",
                                       "L['x'] == 2.0",
                                       "L['x'].stride()[0] == 1",
                                       a + " < 2.5",
                                       a + " ** 2 == 4",
                                       a + " / 2 == 4",
                                       "Max(1, " + a + ") == 4",
                                       "2 <= " + a + " <= 4",
                                       a + " ==",
                                       "(" + a + " == 4",
                                       a + " == 4)",
                                       "L['x.size()[0] == 1",
                                       "L['x'].size()[99999999999999999999] == 1",
                                       std::string(100'000, '('),
                                       std::string(100'000, '-') + a,
                                       a + std::string(100'000, '+')};
  for (const std::string& text : texts) {
    EXPECT_FALSE(SizeGuard::parse(text)) << text.substr(0, 50);
  }
}

}  // namespace
}  // namespace fulgur::program
