#include "fulgur/trainer/simple_profiler.h"

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

trace::Profile::Sums sums(trace::Clock::duration fit, trace::Clock::duration step) {
  return {{"fit", {.calls = 1, .total = fit}},
          {"training step", {.calls = 10, .total = step}},
          {"tiny", {.calls = 3, .total = 1us}}};
}

TEST(SimpleProfiler, ListsTheLongestFirstWithTheirShares) {
  EXPECT_EQ(profile_table({sums(2s, 500ms)}, "fit", 1e-3),
            "  share      calls       mean      total  what\n"
            " 100.0%          1     2.00 s     2.00 s  fit\n"
            "  25.0%         10      50 ms     500 ms  training step\n");
  EXPECT_THAT(profile_table({sums(2s, 500ms)}, "fit", 0.0), HasSubstr("0.0%          3   0.333 us       1 us  tiny\n"));
}

TEST(SimpleProfiler, NamesTheSlowestRank) {
  const std::string table = profile_table({sums(2s, 500ms), sums(2s, 1500ms)}, "fit", 1e-3);
  EXPECT_THAT(table, HasSubstr("  50.0%         10     100 ms     1.00 s  1: x1.50      training step\n"));
}

TEST(SimpleProfiler, SumsSurviveTheWayToOtherRanks) {
  const trace::Profile::Sums before = sums(2s, 500ms);
  const trace::Profile::Sums after = sums_from_text(sums_to_text(before));
  ASSERT_EQ(after.size(), 3U);
  EXPECT_EQ(after.at("training step").calls, 10);
  EXPECT_EQ(after.at("training step").total, trace::Clock::duration(500ms));
}

struct Net : testing::TinyModule {};
struct Watches final : Callback {};

std::string profile_of(const testing::TempDir& dir, int64_t world_size) {
  const auto fit = [&] {
    TrainerOptions options{.max_epochs = 2, .callbacks = {std::make_shared<Watches>()}};
    options.devices = world_size;
    options.default_root_dir = dir.path();
    options.name = "run";
    options.profiler = "simple";
    Trainer(testing::quiet(options)).fit(make_module<Net>(), {.train = testing::tiny_loader(24, 4)});
  };
  ::testing::internal::CaptureStdout();
  world_size == 1 ? fit() : testing::run_ranks(world_size, [&](World&) { fit(); });
  const std::string shown = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(shown, ContainsRegex("100.0% .* fit\n"));
  std::ifstream file(dir.path() / "runs/run/profile-fit.txt");
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(SimpleProfiler, KnowsHooksOfCallbacksPhasesOfTheStepAndTheWaitForData) {
  const testing::TempDir dir;
  const std::string profile = profile_of(dir, 1);
  const std::vector<std::pair<int, const char*>> calls{{12, "training_step"},
                                                       {12, "Watches.on_train_batch_end"},
                                                       {12, "Net.on_train_batch_end"},
                                                       {14, "wait for data"},  // and where each of two epochs begins
                                                       {12, "backward"},
                                                       {12, "optimizer step"},
                                                       {2, "Watches.on_train_epoch_end"}};
  for (const auto& [count, name] : calls) {
    EXPECT_THAT(profile, ContainsRegex(c10::str(" ", count, " [^\n]*  ", name, "\n")));
  }
  EXPECT_THAT(profile, Not(HasSubstr("slowest rank")));
}

TEST(SimpleProfiler, JoinsTheRanks) {
  const testing::TempDir dir;
  const std::string profile = profile_of(dir, 2);
  EXPECT_THAT(profile, ContainsRegex(" 6 [^\n]* [01]: x[0-9]+[.][0-9]+ +training_step\n"));
  EXPECT_THAT(profile, HasSubstr("wait for ranks"));
}

TEST(SimpleProfiler, RefusesUnknownNames) {
  TrainerOptions options;
  options.profiler = "simpel";
  EXPECT_THAT(testing::message_of<UsageError>([&] { Trainer{options}; }), HasSubstr("did you mean 'simple'"));
}

}  // namespace
}  // namespace fulgur
