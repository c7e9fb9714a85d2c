#include "core/describe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using testing::message_of;

TEST(Describe, TextSetsEveryKindOfField) {
  bool flag = false;
  int64_t count = 0;
  double rate = 0;
  std::string name, custom;
  set_field({.name = "flag"}, &flag, "true");
  set_field({.name = "count"}, &count, "-12");
  set_field({.name = "rate"}, &rate, "1e-3");
  set_field({.name = "name"}, &name, "a b");
  set_field({.name = "custom"}, TextField{[&](std::string_view text) { custom = text; }, [&] { return custom; }}, "2,");
  EXPECT_TRUE(flag);
  EXPECT_EQ(count, -12);
  EXPECT_EQ(rate, 1e-3);
  EXPECT_EQ(name, "a b");
  EXPECT_EQ(custom, "2,");
}

TEST(Describe, TextOfAFieldSetsItAgain) {
  double rate = 0.1, again = 0;
  set_field({.name = "rate"}, &again, field_text(&rate));
  EXPECT_EQ(rate, again);
}

TEST(Describe, RefusesTextOfAnotherKind) {
  bool flag = false;
  int64_t count = 0;
  double rate = 0;
  EXPECT_EQ(message_of<UsageError>([&] { set_field({.name = "n"}, &count, "3.5"); }), "n: '3.5' is not a whole number");
  EXPECT_EQ(message_of<UsageError>([&] { set_field({.name = "n"}, &count, ""); }), "n: '' is not a whole number");
  EXPECT_EQ(message_of<UsageError>([&] { set_field({.name = "n"}, &count, "99999999999999999999"); }),
            "n: '99999999999999999999' is out of range");
  EXPECT_EQ(message_of<UsageError>([&] { set_field({.name = "lr"}, &rate, "fast"); }), "lr: 'fast' is not a number");
  EXPECT_EQ(message_of<UsageError>([&] { set_field({.name = "f"}, &flag, "maybe"); }),
            "f: 'maybe' is not true or false");
}

TEST(Describe, ChecksRangeAndChoices) {
  int64_t count = 0;
  double rate = 2;
  std::string mode = "mni";
  EXPECT_EQ(message_of<UsageError>([&] { check_field({.name = "n", .min = 1}, &count); }),
            "n must be at least 1; got 0");
  EXPECT_EQ(message_of<UsageError>([&] { check_field({.name = "r", .max = 1}, &rate); }), "r must be at most 1; got 2");
  EXPECT_EQ(message_of<UsageError>([&] { check_field({.name = "mode", .choices = {"min", "max"}}, &mode); }),
            "unknown mode 'mni'; did you mean 'min'? known: min, max");
}

TEST(Describe, RefusesNaNWhereThereIsARange) {
  double rate = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(check_field({.name = "lr", .min = 0}, &rate), UsageError);
}

struct Options {
  double lr = 1;
  void describe(FieldVisitor& visit) { visit({.name = "lr", .min = 0}, &lr); }
};

TEST(Describe, ChecksAWholeStructAndNamesItsOwner) {
  check_fields("Thing", Options{});
  EXPECT_EQ(message_of<UsageError>([] { check_fields("Thing", Options{.lr = -1}); }),
            "Thing: lr must be at least 0; got -1");
}

}  // namespace
}  // namespace fulgur
