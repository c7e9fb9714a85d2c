#include "fulgur/strategies/forwarding_strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <regex>
#include <set>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

std::set<std::string> names_in(const std::string& header, const std::regex& declaration) {
  std::ifstream file(header);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::set<std::string> names;
  for (std::sregex_iterator found(text.begin(), text.end(), declaration), end; found != end; ++found) {
    names.insert((*found)[1]);
  }
  return names;
}

// A virtual member that was added to Strategy and not here would silently do what Strategy's default does.
TEST(ForwardingStrategy, ForwardsEveryMember) {
  const std::set<std::string> members = names_in("strategies/strategy.h", std::regex(R"(\n  virtual [^~;{]*?(\w+)\()"));
  std::set<std::string> forwarded =
      names_in("strategies/forwarding_strategy.h", std::regex(R"(\n  [^;{}/]*?(\w+)\([^;{}]*\)[a-z ]* override )"));
  EXPECT_GE(members.size(), 20U);
  forwarded.insert("name");  // which a class of its own must give
  EXPECT_EQ(forwarded, members);
}

struct Counting : ForwardingStrategy {
  explicit Counting(const StrategyChoice& base) : ForwardingStrategy(base) {}
  std::string name() const override { return "counting"; }
  StepReport optimizer_step(size_t optimizer, const StepRequest& request) override {
    ++steps;
    return ForwardingStrategy::optimizer_step(optimizer, request);
  }
  static inline int steps = 0;
};

struct OptionsOfTheBase {
  static constexpr std::string_view kName = "counting";
  double bucket_cap_mib = 4, no_setting = 1;
  bool wrong = false;
  void describe(FieldVisitor& visit) {
    visit({.name = "bucket_cap_mib", .help = "size of a bucket"}, &bucket_cap_mib);
    if (wrong) visit({.name = "no_setting", .help = "a setting that there is not"}, &no_setting);
  }
};

TEST(ForwardingStrategy, TrainsAsItsBaseBySettingsOfTheBase) {
  strategy_registry().add("counting", [] { return std::make_unique<Counting>("ddp"); });
  Counting::steps = 0;
  Trainer(testing::quiet({.strategy = "counting"}))
      .fit(make_module<testing::TinyModule>(), {.train = testing::tiny_loader(40, 8)});
  EXPECT_EQ(Counting::steps, 5);
  EXPECT_EQ(StrategyChoice(OptionsOfTheBase()).make("auto")->name(), "counting");
  EXPECT_THAT(testing::message_of<UsageError>([] { StrategyChoice(OptionsOfTheBase{.wrong = true}).make("auto"); }),
              ::testing::HasSubstr("no_setting"));
  EXPECT_THROW(Counting("ddpp"), UsageError);
}

}  // namespace
}  // namespace fulgur
