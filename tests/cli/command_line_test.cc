#include "fulgur/cli/command_line.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "fulgur/base/error.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer_options.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

struct Options {
  TrainerOptions trainer;
  double lr = 0.5;
  bool verbose = false;
  std::string title = "x";
  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
    visit({.name = "verbose", .help = "print more"}, &verbose);
    visit({.name = "title", .help = "title of the run"}, &title);
  }
};

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  EXPECT_TRUE(parse_flags(arguments, "bin/program", [&](FieldVisitor& visit) { options.describe(visit); }));
  return options;
}

std::string refusal(const std::vector<std::string>& arguments) {
  return message_of<UsageError>([&] { parse(arguments); });
}

TEST(CommandLine, SetsWhatIsGivenAndLeavesTheRest) {
  const Options options = parse({"--lr=1e-3", "--max_epochs", "7", "--devices=0,1", "--strategy=single-device"});
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_EQ(options.trainer.max_epochs, 7);
  EXPECT_EQ(options.trainer.devices.to_string(), "0,1");
  EXPECT_EQ(options.trainer.strategy.name(), "single-device");
  EXPECT_EQ(options.title, "x");
}

TEST(CommandLine, DashAndUnderscoreAreTheSameInNamesOnly) {
  const Options options = parse({"--max-epochs=-1", "--title=a-B"});
  EXPECT_EQ(options.trainer.max_epochs, -1);
  EXPECT_EQ(options.title, "a-B");
}

TEST(CommandLine, TheLastOneWins) { EXPECT_EQ(parse({"--lr=1", "--lr=2"}).lr, 2); }

TEST(CommandLine, ASwitchNeedsNoValue) {
  EXPECT_TRUE(parse({"--verbose", "--lr=1"}).verbose);
  EXPECT_FALSE(parse({"--verbose=false"}).verbose);
  EXPECT_EQ(parse({"--logger", "false"}).trainer.logger, false);
  EXPECT_EQ(parse({"--title=", "--lr=1"}).title, "");
}

TEST(CommandLine, RefusesUnknownFlagsWithTheNearest) {
  EXPECT_THAT(refusal({"--max_epohcs=3"}), HasSubstr("unknown flag 'max_epohcs'; did you mean 'max_epochs'? known: "));
  EXPECT_THAT(refusal({"--epochs=3"}), HasSubstr("did you mean 'max_epochs'?"));
  EXPECT_THAT(refusal({"-x"}), HasSubstr("unknown flag 'x'"));
}

TEST(CommandLine, RefusesAnUnknownStrategyWithTheNearest) {
  EXPECT_EQ(
      refusal({"--strategy=singel_device"}),
      "--strategy: unknown strategy 'singel_device'; did you mean 'single_device'? known: auto, ddp, ddp_sharded, "
      "delayed_update, dp, single_device, zero_offload");
}

TEST(CommandLine, SettingsOfAStrategyAreFlags) {
  const auto make = [](const std::vector<std::string>& flags) { return parse(flags).trainer.strategy.make("ddp"); };
  EXPECT_EQ(make({"--strategy=ddp", "--strategy.timeout-s=7"})->rank_per_device()->timeout_s, 7);
  EXPECT_EQ(make({"--strategy.timeout_s=7", "--strategy=ddp"})->rank_per_device()->timeout_s, 7);
  const auto refusal_of = [&](const std::vector<std::string>& flags) {
    return message_of<UsageError>([&] { make(flags); });
  };
  EXPECT_EQ(refusal_of({"--strategy=single_device", "--strategy.timeout_s=7"}),
            "strategy 'single_device' has no settings, but strategy.timeout_s is set");
  EXPECT_EQ(refusal_of({"--strategy=ddp", "--strategy.timeout_s=0"}), "strategy.timeout_s must be at least 1; got 0");
  EXPECT_THAT(refusal({"--strategy.timout_s=1"}), HasSubstr("did you mean 'strategy.timeout_s'?"));
}

TEST(CommandLine, AnOptionsStructIsAStrategy) {
  const TrainerOptions options{.strategy = Ddp{.timeout_s = 9}};
  EXPECT_EQ(options.strategy.make("auto")->rank_per_device()->timeout_s, 9);
  EXPECT_EQ(options.strategy.name(), "ddp");
}

TEST(CommandLine, RefusesBadValues) {
  EXPECT_EQ(refusal({"--lr=fast"}), "--lr: 'fast' is not a number");
  EXPECT_EQ(refusal({"--lr=-1"}), "--lr must be at least 0; got -1");
  EXPECT_EQ(refusal({"--max_epochs=1.5"}), "--max_epochs: '1.5' is not a whole number");
  EXPECT_EQ(refusal({"--title"}), "--title: 1 required TEXT missing");
  EXPECT_EQ(refusal({"7"}), "unexpected argument '7'; flags are written --name=value");
}

TEST(CommandLine, HelpListsEveryFieldWithItsDefault) {
  Options options;
  ::testing::internal::CaptureStdout();
  EXPECT_FALSE(parse_flags({"--help"}, "bin/program", [&](FieldVisitor& visit) { options.describe(visit); }));
  const std::string help = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(help, HasSubstr("Usage: program"));
  EXPECT_THAT(help, HasSubstr("--lr NUMBER=0.5"));
  EXPECT_THAT(help,
              HasSubstr("how to train (auto, ddp, ddp_sharded, delayed_update, dp, single_device, zero_offload)"));
}

struct Outcome {
  int exit_code;
  std::string printed;
};

Outcome outcome_of(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  const int exit_code = exit_code_of(body);
  return {exit_code, ::testing::internal::GetCapturedStderr()};
}

TEST(ExitCode, Is0WhenAllIsWell) {
  EXPECT_EQ(exit_code_of([] {}), 0);
}

TEST(ExitCode, Is2ForUsageAnd1ForTheRestWithoutStackTrace) {
  const Outcome usage = outcome_of([] { throw UsageError("bad flag"); });
  EXPECT_EQ(usage.exit_code, 2);
  EXPECT_EQ(usage.printed, "error: bad flag\n");
  const Outcome torch = outcome_of([] { TORCH_CHECK_VALUE(false, "bad shape"); });
  EXPECT_EQ(torch.exit_code, 1);
  EXPECT_EQ(torch.printed, "error: bad shape\n");
  EXPECT_EQ(outcome_of([] { throw std::runtime_error("bad luck"); }).exit_code, 1);
  const Outcome number = outcome_of([] { throw 7; });
  EXPECT_EQ(number.exit_code, 1);
  EXPECT_EQ(number.printed, "error: an exception of type int\n");
}

}  // namespace
}  // namespace fulgur
