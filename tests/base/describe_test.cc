#include "fulgur/base/describe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/field_state.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using testing::message_of;
using ::testing::Pair;

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

enum class Mode { min, max };

struct ManyKinds {
  int layers = 2;
  float momentum = 0.1F;
  Mode mode = Mode::min;
  std::vector<int64_t> widths{64, 32};
  std::vector<int> none{};
  std::vector<std::string> names{"a", "b"};
  std::vector<Mode> modes{Mode::max};
  void describe(FieldVisitor& visit) {
    visit({.name = "layers", .min = 1}, &layers);
    visit({.name = "momentum", .max = 1}, &momentum);
    visit({.name = "mode", .choices = {"min", "max"}}, &mode);
    visit({.name = "widths", .min = 1}, &widths);
    visit({.name = "none"}, &none);
    visit({.name = "names"}, &names);
    visit({.name = "modes", .choices = {"min", "max"}}, &modes);
  }
};

// The texts of all fields, by name.
std::map<std::string, std::string> texts_of(ManyKinds options) {
  struct Reader : FieldVisitor {
    std::map<std::string, std::string> texts;
    void operator()(const Field& field, FieldValue value) override {
      texts[std::string(field.name)] = field_text(value);
    }
  } reader;
  options.describe(reader);
  return reader.texts;
}

void set(ManyKinds& options, const std::string& name, const std::string& text) {
  struct Writer : FieldVisitor {
    const std::string& name;
    const std::string& text;
    Writer(const std::string& wanted, const std::string& given) : name(wanted), text(given) {}
    void operator()(const Field& field, FieldValue value) override {
      if (field.name == name) set_field(field, value, text);
    }
  } writer(name, text);
  options.describe(writer);
}

TEST(Describe, RefusesElementsThatAListCouldNotReadBack) {
  for (const std::vector<std::string>& names : {std::vector<std::string>{"a,b"}, {"a", ""}, {""}}) {
    ManyKinds options;
    options.names = names;
    EXPECT_THAT(message_of<UsageError>([&] { texts_of(options); }),
                ::testing::HasSubstr("can neither be empty nor have a comma"));
  }
}

TEST(Describe, KnowsSmallNumbersEnumsAndVectors) {
  EXPECT_THAT(texts_of({}), ::testing::ElementsAre(Pair("layers", "2"), Pair("mode", "min"), Pair("modes", "max"),
                                                   Pair("momentum", "0.1"), Pair("names", "a,b"), Pair("none", ""),
                                                   Pair("widths", "64,32")));
  ManyKinds options;
  set(options, "layers", "3");
  set(options, "momentum", "0.5");
  set(options, "mode", "MAX");
  set(options, "widths", "8");
  set(options, "none", "1,-2");
  set(options, "names", "");
  set(options, "modes", "max,min");
  EXPECT_EQ(options.layers, 3);
  EXPECT_EQ(options.momentum, 0.5F);
  EXPECT_EQ(options.mode, Mode::max);
  EXPECT_THAT(options.widths, ElementsAre(8));
  EXPECT_THAT(options.none, ElementsAre(1, -2));
  EXPECT_TRUE(options.names.empty());
  EXPECT_THAT(options.modes, ElementsAre(Mode::max, Mode::min));
}

struct Optionals {
  std::optional<double> threshold{};
  std::optional<int64_t> count = 3;
  std::optional<bool> flag{};
  std::filesystem::path file{};
  void describe(FieldVisitor& visit) {
    visit({.name = "threshold", .max = 1}, &threshold);
    visit({.name = "count", .min = 1}, &count);
    visit({.name = "flag"}, &flag);
    visit({.name = "file"}, &file);
  }
};

TEST(Describe, OptionalsCanBeUnsetAndPathsAreText) {
  Optionals options;
  const auto set_it = [&](std::optional<double>* value, std::string_view text) {
    set_field({.name = "threshold", .max = 1}, value, text);
  };
  set_it(&options.threshold, "0.25");
  EXPECT_EQ(options.threshold, 0.25);
  EXPECT_EQ(message_of<UsageError>([&] { set_it(&options.threshold, "2"); }), "threshold must be at most 1; got 2");
  EXPECT_EQ(message_of<UsageError>([&] { set_it(&options.threshold, "low"); }), "threshold: 'low' is not a number");
  EXPECT_EQ(options.threshold, 0.25);  // unchanged
  EXPECT_EQ(message_of<UsageError>([] { check_fields("Thing", Optionals{.count = 0}); }),
            "Thing: count must be at least 1; got 0");
  options.file = "a/b.csv";
  options.count.reset();
  const State state = fields_to_state(options);
  EXPECT_EQ(state.get<double>("threshold"), 0.25);
  EXPECT_EQ(state.get<std::string>("count"), "none");
  EXPECT_EQ(state.get<std::string>("file"), "a/b.csv");
  Optionals again;
  set_fields(again, state);
  EXPECT_EQ(again.threshold, 0.25);
  EXPECT_EQ(again.count, std::nullopt);
  EXPECT_EQ(again.file, "a/b.csv");
}

TEST(Describe, ChangedFieldsAreThoseThatAreNotTheDefaults) {
  EXPECT_EQ(changed_fields(Optionals{}), "");
  EXPECT_EQ(changed_fields(Optionals{.threshold = 0.5, .count = std::nullopt}), "threshold=0.5,count=none");
}

TEST(Describe, RefusesWhatSmallNumbersEnumsAndVectorsCannotBe) {
  ManyKinds options;
  const auto told = [&](const std::string& name, const std::string& text) {
    return message_of<UsageError>([&] { set(options, name, text); });
  };
  EXPECT_EQ(told("layers", "3000000000"), "layers: '3000000000' is out of range");
  EXPECT_EQ(told("layers", "0"), "layers must be at least 1; got 0");
  EXPECT_EQ(told("momentum", "2"), "momentum must be at most 1; got 2");
  EXPECT_EQ(told("mode", "mni"), "mode: unknown value 'mni'; did you mean 'min'? known: min, max");
  EXPECT_EQ(told("widths", "8,x"), "widths: element 1: 'x' is not a whole number");
  EXPECT_EQ(told("widths", "0"), "widths: element 0 must be at least 1; got 0");
  EXPECT_EQ(told("modes", "max,mni"), "modes: element 1: unknown value 'mni'; did you mean 'min'? known: min, max");
  EXPECT_THAT(options.widths, ElementsAre(64, 32));  // unchanged

  EXPECT_EQ(message_of<UsageError>([] { check_fields("Thing", ManyKinds{.widths = {8, 0}}); }),
            "Thing: widths: element 1 must be at least 1; got 0");
  EXPECT_EQ(message_of<UsageError>([] { check_fields("Thing", ManyKinds{.mode = static_cast<Mode>(7)}); }),
            "Thing: mode: the value 7 has no name; choices must name every value of the enum, from 0 on");
}

TEST(Describe, SmallNumbersEnumsAndVectorsAreStateToo) {
  const State state = fields_to_state(ManyKinds{.layers = 5, .momentum = 0.25F, .mode = Mode::max, .widths = {7, 9}});
  EXPECT_EQ(state.get<int64_t>("layers"), 5);
  EXPECT_EQ(state.get<double>("momentum"), 0.25);
  EXPECT_EQ(state.get<std::string>("mode"), "max");
  ManyKinds again;
  set_fields(again, state);
  EXPECT_EQ(again.layers, 5);
  EXPECT_EQ(again.momentum, 0.25F);
  EXPECT_EQ(again.mode, Mode::max);
  EXPECT_THAT(again.widths, ElementsAre(7, 9));
}

struct Pairs {
  std::pair<double, double> betas{0.9, 0.95};
  uint64_t seed = 1;
  void describe(FieldVisitor& visit) {
    visit({.name = "betas", .help = "two decays", .min = 0, .max = 1}, &betas);
    visit({.name = "seed", .help = "number that decides the draws"}, &seed);
  }
};

TEST(Describe, APairIsAListOfTwo) {
  Pairs pairs{.betas = {0.5, 0.25}, .seed = std::numeric_limits<uint64_t>::max()};
  const State state = fields_to_state(pairs);
  EXPECT_EQ(state.get<std::string>("betas"), "0.5,0.25");
  Pairs again;
  set_fields(again, state);
  EXPECT_EQ(again.betas, pairs.betas);
  EXPECT_EQ(again.seed, pairs.seed);
  const auto refusal = [&](const char* name, const char* text) {
    State wrong;
    wrong.set(name, std::string(text));
    return testing::message_of<UsageError>([&] { set_fields(pairs, wrong); });
  };
  EXPECT_EQ(refusal("betas", "0.5"), "betas: this is a pair, such as 0.9,0.95; got 1 values");
  EXPECT_EQ(refusal("betas", "0.5,2"), "betas: element 1 must be at most 1; got 2");
  EXPECT_EQ(refusal("betas", "0.5,x"), "betas: element 1: 'x' is not a number");
  EXPECT_EQ(refusal("seed", "-1"), "seed: '-1' is not a whole number from 0 to 18446744073709551615");
  EXPECT_EQ(pairs.betas, std::pair(0.5, 0.25));  // as before
  EXPECT_THAT(testing::message_of<UsageError>([] { check_fields("Adam", Pairs{.betas = {0.5, -1}}); }),
              ::testing::HasSubstr("Adam: betas: element 1 must be at least 0; got -1"));
}

TEST(Describe, ChecksAWholeStructAndNamesItsOwner) {
  check_fields("Thing", Options{});
  EXPECT_EQ(message_of<UsageError>([] { check_fields("Thing", Options{.lr = -1}); }),
            "Thing: lr must be at least 0; got -1");
}

}  // namespace
}  // namespace fulgur
