#include "fulgur/cli/command_line.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <stdexcept>

#include "fulgur/base/error.h"
#include "fulgur/base/version.h"
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

TEST(CommandLine, AValueMayEndInAnEqualsSign) { EXPECT_EQ(parse({"--title=YWI=", "--lr=1"}).title, "YWI="); }

TEST(CommandLine, RefusesUnknownFlagsWithTheNearest) {
  EXPECT_THAT(refusal({"--max_epohcs=3"}), HasSubstr("unknown flag 'max_epohcs'; did you mean 'max_epochs'?"));
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
            "--strategy.timeout_s is set, but strategy is single_device, which does not use it; leave it out, or write "
            "strategy = ddp, or ddp_sharded, or delayed_update, or zero_offload");
  EXPECT_EQ(refusal_of({"--strategy=ddp", "--strategy.shard_group=2"}),
            "--strategy.shard_group is set, but strategy is ddp, which does not use it; leave it out, or write "
            "strategy = ddp_sharded, or delayed_update, or zero_offload");
  EXPECT_EQ(refusal_of({"--strategy=ddp", "--strategy.timeout_s=0"}), "--strategy.timeout_s must be at least 1; got 0");
  EXPECT_EQ(make({"--strategy.timeout_s=7"})->rank_per_device()->timeout_s, 7);  // auto has become ddp
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
  EXPECT_EQ(refusal({"--title"}), "--title needs a value; write --title=value");
  EXPECT_EQ(refusal({"7"}), "unexpected argument '7'; flags are written --name=value");
}

struct Sections {
  TrainerOptions trainer;
  Options model;
  void describe(FieldVisitor& visit) {
    visit({.name = "trainer", .help = "how to train"}, &trainer);
    visit({.name = "lr", .help = "learning rate", .unit = "1/s"}, &model.lr);
    visit({.name = "model.title", .help = "title of the model"}, &model.title);
  }
};

std::string printed(const std::vector<std::string>& arguments) {
  Sections options;
  ::testing::internal::CaptureStdout();
  EXPECT_FALSE(parse_flags(arguments, "bin/program", [&](FieldVisitor& visit) { options.describe(visit); }));
  return ::testing::internal::GetCapturedStdout();
}

TEST(CommandLine, HelpIsOneScreenBySections) {
  const std::string help = printed({"--help"});
  EXPECT_THAT(help, HasSubstr("usage: program [--option=value ...]\n"));
  EXPECT_THAT(help, HasSubstr("\nprogram\n  --lr=0.5                        learning rate, in 1/s\n"));
  EXPECT_THAT(help, HasSubstr("\nmodel\n  --model.title=x                 title of the model\n"));
  EXPECT_THAT(help, HasSubstr("\ntrainer: common options\n  --accelerator=auto"));
  EXPECT_THAT(help, HasSubstr("--max_epochs=none"));
  EXPECT_THAT(help, ::testing::Not(HasSubstr("ckpt_verify")));
  EXPECT_LE(std::ranges::count(help, '\n'), 50);
  EXPECT_EQ(printed({"-h"}), help);
  EXPECT_EQ(printed({"--version"}), "program: fulgur " FULGUR_VERSION ", libtorch " TORCH_VERSION "\n");
  EXPECT_EQ(printed({"--lr=2", "--help"}), help);  // what is given is not looked at
}

TEST(CommandLine, HelpForAllAndForASection) {
  const std::string all = printed({"--help=all"});
  for (const char* flag : {"--ckpt_verify=true", "--strategy.timeout_s=", "--optimizer.betas=0.9,0.999",
                           "--scheduler.step_size=0", "--checkpoint.monitor=TEXT", "--model.title=x"}) {
    EXPECT_THAT(all, HasSubstr(flag));
  }
  const std::string strategy = printed({"--help=strategy"});
  EXPECT_THAT(strategy, ::testing::StartsWith("strategy\n  --strategy=auto"));
  EXPECT_THAT(strategy, HasSubstr("--strategy.timeout_s="));
  EXPECT_THAT(strategy, ::testing::Not(HasSubstr("max_epochs")));
  EXPECT_THAT(printed({"--help=max_epochs"}), HasSubstr("--max_epochs=none"));
  EXPECT_THAT(printed({"--help=trainer"}), HasSubstr("--ckpt_verify=true"));
  EXPECT_THAT(refusal({"--help=strat"}),
              HasSubstr("--help: unknown section or option 'strat'; did you mean 'strategy'?"));
}

// What bash offers for the words of a line that ends with `last`.
std::string completions(const std::string& before, const std::string& last) {
  std::string script = printed({"--completion=bash"});
  const std::string quote = "'", quoted = "'\\''";
  for (size_t at = script.find(quote); at != std::string::npos; at = script.find(quote, at + quoted.size())) {
    script.replace(at, quote.size(), quoted);
  }
  const std::string command = "bash -c '" + script + "COMP_WORDS=(program " + before + " \"" + last +
                              "\"); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _fulgur_program; echo \"${COMPREPLY[@]}\"'";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string text(1 << 16, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), pipe.get()));
  return text;
}

TEST(CommandLine, BashCompletesFlagsAndTheirValues) {
  EXPECT_EQ(completions("", "--max_e"), "--max_epochs=\n");
  EXPECT_EQ(completions("--lr = 3", "--model.t"), "--model.title=\n");
  EXPECT_EQ(completions("--strategy", "="),
            "auto ddp ddp_sharded delayed_update dp single_device zero_offload\n");  // bash splits at =
  EXPECT_EQ(completions("--strategy =", "zero"), "zero_offload\n");
  EXPECT_EQ(completions("--deterministic =", "t"), "true\n");
  EXPECT_THAT(refusal({"--completion=zsh"}), HasSubstr("write --completion=bash"));
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
