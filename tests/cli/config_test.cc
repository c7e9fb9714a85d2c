// Options from files, the environment and flags.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/callback_registry.h"
#include "fulgur/callbacks/learning_rate_monitor.h"
#include "fulgur/callbacks/tensorboard_logger.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer_options.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

struct Limits {
  int64_t rows = 10;
  std::optional<int64_t> columns{};
  void describe(FieldVisitor& visit) {
    visit({.name = "rows", .help = "rows to read", .min = 1}, &rows);
    visit({.name = "columns", .help = "columns to read; none: all", .min = 1}, &columns);
  }
};

struct Options {
  TrainerOptions trainer;
  Limits limits;
  double lr = 0.5;
  bool verbose = false;
  std::string title = "x";
  std::vector<int64_t> widths{64, 32};
  void describe(FieldVisitor& visit) {
    visit({.name = "trainer", .help = "how to train"}, &trainer);
    visit({.name = "limits", .help = "how much to read"}, &limits);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
    visit({.name = "verbose", .help = "print more"}, &verbose);
    visit({.name = "title", .help = "title of the run"}, &title);
    visit({.name = "widths", .help = "widths of the layers", .min = 1}, &widths);
  }
};

class ConfigTest : public ::testing::Test {
 protected:
  // Writes a file of the folder, and returns its path.
  std::string file(const std::string& name, const std::string& text) {
    const auto path = dir_.path() / name;
    std::ofstream(path) << text;
    return path.string();
  }
  std::string path(const std::string& name) const { return (dir_.path() / name).string(); }

  Options parse(const std::vector<std::string>& arguments, const EnvironmentVariables& variables = {}) {
    Options options;
    EXPECT_TRUE(parse_flags(arguments, "program", [&](FieldVisitor& visit) { options.describe(visit); }, variables));
    return options;
  }
  std::string refusal(const std::vector<std::string>& arguments, const EnvironmentVariables& variables = {}) {
    return message_of<UsageError>([&] { parse(arguments, variables); });
  }
  std::string printed(std::vector<std::string> arguments, const EnvironmentVariables& variables = {}) {
    Options options;
    arguments.push_back("--print-config");
    ::testing::internal::CaptureStdout();
    EXPECT_FALSE(parse_flags(arguments, "program", [&](FieldVisitor& visit) { options.describe(visit); }, variables));
    return ::testing::internal::GetCapturedStdout();
  }

 private:
  const testing::TempDir dir_;
};

TEST_F(ConfigTest, AFileSetsOptionsOfEveryKind) {
  const Options options = parse({"--config=" + file("run.toml", R"(
lr = 1e-3
verbose = true
title = "a \"b\", c"
widths = [128, 64, 32]

[trainer]
max_epochs = 7
devices = [0, 1]
precision = 32
limit_train_batches = "10%"
strategy = "ddp"

[limits]
rows = 3
columns = 4
)")});
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_TRUE(options.verbose);
  EXPECT_EQ(options.title, "a \"b\", c");
  EXPECT_THAT(options.widths, ElementsAre(128, 64, 32));
  EXPECT_EQ(options.trainer.max_epochs, 7);
  EXPECT_EQ(options.trainer.devices.to_string(), "0,1");
  EXPECT_EQ(options.trainer.precision, "32");
  EXPECT_EQ(options.trainer.limit_train_batches.to_string(), "10%");
  EXPECT_EQ(options.trainer.strategy.name(), "ddp");
  EXPECT_EQ(options.limits.rows, 3);
  EXPECT_EQ(options.limits.columns, 4);
}

TEST_F(ConfigTest, LaterSourcesWin) {
  const std::string a = file("a.toml", "lr = 1\n[trainer]\nmax_epochs = 1\n[limits]\nrows = 1\n");
  const std::string b = file("b.toml", "lr = 2\n[trainer]\nmax_epochs = 2\n");
  const EnvironmentVariables variables{
      {"FULGUR_TRAINER__MAX_EPOCHS", "3"}, {"FULGUR__TITLE", "env"}, {"FULGUR_TRACE", "folder"}, {"PATH", "__"}};
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--config", a, "--config=" + b, "--max_epochs=4"},
        std::vector<std::string>{"--max_epochs=4", "--config=" + a, "--config=" + b}}) {
    const Options options = parse(arguments, variables);
    EXPECT_EQ(options.limits.rows, 1);
    EXPECT_EQ(options.lr, 2);
    EXPECT_EQ(options.title, "env");
    EXPECT_EQ(options.trainer.max_epochs, 4);
  }
  EXPECT_EQ(parse({"--config=" + b, "--config=" + a}, variables).lr, 1);
  EXPECT_EQ(parse({"--config=" + b}, variables).trainer.max_epochs, 3);
}

TEST_F(ConfigTest, FilesMayIncludeOthers) {
  file("base.toml", "lr = 1\ntitle = \"base\"\n");
  file("more.toml", "verbose = true\n");
  const std::string run = file("run.toml", "include = [\"base.toml\", \"more.toml\"]\ntitle = \"run\"\n");
  const Options options = parse({"--config=" + run});
  EXPECT_EQ(options.lr, 1);
  EXPECT_TRUE(options.verbose);
  EXPECT_EQ(options.title, "run");
  file("a.toml", "include = \"b.toml\"\n");
  file("b.toml", "\n  include = \"a.toml\"\n");
  EXPECT_THAT(refusal({"--config=" + path("a.toml")}),
              AllOf(HasSubstr("b.toml:2:13: "), HasSubstr("includes itself: a.toml -> b.toml -> a.toml")));
}

TEST_F(ConfigTest, TheTrainerAndItsStrategyNeedNoSectionOfTheirOwn) {
  EXPECT_EQ(parse({"--trainer.max_epochs=5"}).trainer.max_epochs, 5);
  EXPECT_EQ(parse({"--max_epochs=5"}).trainer.max_epochs, 5);
  EXPECT_EQ(parse({"--limits.rows=5"}).limits.rows, 5);
  for (const char* text : {"max_epochs = 5\n[strategy]\ntype = \"ddp\"\ntimeout_s = 7\n",
                           "[trainer]\nmax_epochs = 5\n[trainer.strategy]\ntype = \"ddp\"\ntimeout_s = 7\n"}) {
    const Options options = parse({"--config=" + file("run.toml", text)});
    EXPECT_EQ(options.trainer.max_epochs, 5);
    EXPECT_EQ(options.trainer.strategy.make("auto")->rank_per_device()->timeout_s, 7);
  }
}

// As a flag, trainer.max_epochs is --max_epochs; as a variable it has its whole path. An option outside of sections has
// "__" in front.
TEST_F(ConfigTest, VariablesWithoutTheDotsOfAPathAreRefused) {
  for (const std::string name : {"FULGUR_MAX_EPOCHS", "FULGUR_TRAINER_MAX_EPOCHS"})
    EXPECT_EQ(refusal({}, {{name, "5"}}), name + ": the variable of trainer.max_epochs is FULGUR_TRAINER__MAX_EPOCHS");
  EXPECT_EQ(refusal({}, {{"FULGUR_LIMITS_ROWS", "5"}}),
            "FULGUR_LIMITS_ROWS: the variable of limits.rows is FULGUR_LIMITS__ROWS");
  EXPECT_EQ(refusal({}, {{"FULGUR_TITLE", "env"}}), "FULGUR_TITLE: the variable of title is FULGUR__TITLE");
  EXPECT_EQ(refusal({}, {{"FULGUR_VERBOSE", "1"}}), "FULGUR_VERBOSE: the variable of verbose is FULGUR__VERBOSE");
}

TEST_F(ConfigTest, VariablesThatFulgurReadsAreNeverRefused) {
  std::string trace = "none", id = "none";
  const auto describe = [&](FieldVisitor& visit) {
    visit({.name = "trace", .help = "an option with the name of a variable of fulgur"}, &trace);
    visit({.name = "host.id", .help = "another one, in a section"}, &id);
  };
  EXPECT_TRUE(parse_flags({}, "program", describe, {{"FULGUR_TRACE", "folder"}, {"FULGUR_HOST_ID", "a"}}));
  EXPECT_EQ(trace, "none");
  EXPECT_EQ(id, "none");
  EXPECT_TRUE(parse_flags({}, "program", describe, {{"FULGUR__TRACE", "folder"}, {"FULGUR_HOST__ID", "a"}}));
  EXPECT_EQ(trace, "folder");
  EXPECT_EQ(id, "a");
}

TEST_F(ConfigTest, PrintsEveryOptionWithItsOrigin) {
  const std::string run = file("run.toml", "lr = 2\n[strategy]\ntype = \"ddp\"\n");
  const std::string text =
      printed({"--config=" + run, "--title=a \"b\"", "--limits.columns=none"}, {{"FULGUR__VERBOSE", "true"}});
  EXPECT_THAT(text, ::testing::StartsWith("lr = 2 "));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nverbose = true +# FULGUR__VERBOSE\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("lr = 2 +# .*/run.toml:1:6\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nwidths = \"64,32\" +# default\n"));
  EXPECT_THAT(
      text, ::testing::ContainsRegex("\n\\[limits\\]\nrows = 10 +# default\ncolumns = \"none\" +# --limits.columns\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\n\\[trainer.strategy\\]\ntype = \"ddp\" +# .*/run.toml:3:8\n"));
  EXPECT_THAT(text, HasSubstr("\ntimeout_s = "));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("warmup_steps")));  // delayed_update has it
}

TEST_F(ConfigTest, WhatItPrintsIsAConfigOfTheSameOptions) {
  const auto without_origins = [](const std::string& text) {
    std::string all;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) all += line.substr(0, line.find("  #")) + "\n";
    return all;
  };
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{},
        std::vector<std::string>{"--strategy=delayed_update", "--strategy.warmup_steps=3", "--lr=1e-300"},
        std::vector<std::string>{"--strategy=ddp_sharded", "--max_time=00:01:00:00", "--title=\t\\\"x", "--lr=inf"},
        std::vector<std::string>{"--widths=1", "--limits.columns=3", "--val_check_interval=10%"}}) {
    const std::string first = printed(arguments);
    const std::string second = printed({"--config=" + file("printed.toml", first)});
    EXPECT_EQ(without_origins(first), without_origins(second));
    parse({"--config=" + path("printed.toml")}).trainer.strategy.make("single_device");
  }
}

TEST_F(ConfigTest, SaysAllThatIsWrongAndWhere) {
  const std::string run = file("run.toml", R"(lr = "fast"
lerning_rate = 1
title = 2000-01-01
[trainer]
max_epoch = 3
max_steps = 2.5
accelerator = "tpu"
enable_progress_bar = 1.5
[limits]
rows = 0
colums = [1, [2]]
)");
  const std::string message =
      refusal({"--config=" + run, "--lr=-1", "--titel=y"}, {{"FULGUR_LIMITS__ROW", "1"}, {"FULGUR__LR", "x"}});
  const auto at = [&](const std::string& rest) { return HasSubstr(run + rest); };
  EXPECT_THAT(message, ::testing::StartsWith("13 things are wrong:\n  " + run + ":1:6: "));
  EXPECT_THAT(message, at(":1:6: lr must be a number; got the text \"fast\""));
  EXPECT_THAT(message, at(":2:16: unknown option 'lerning_rate'; --help=all lists all"));
  EXPECT_THAT(message, at(":3:9: title must be text, a number, true or false, or a list of these"));
  EXPECT_THAT(message, at(":5:13: unknown option 'trainer.max_epoch'; did you mean 'trainer.max_epochs'?"));
  EXPECT_THAT(message, at(":6:13: trainer.max_steps: '2.5' is not a whole number"));
  EXPECT_THAT(message, at(":7:15: unknown trainer.accelerator 'tpu'"));
  EXPECT_THAT(message, at(":8:23: trainer.enable_progress_bar: '1.5' is not true or false"));
  EXPECT_THAT(message, at(":10:8: limits.rows must be at least 1; got 0"));
  EXPECT_THAT(message, at(":11:10: unknown option 'limits.colums'; did you mean 'limits.columns'?"));
  EXPECT_THAT(message, HasSubstr("FULGUR_LIMITS__ROW: unknown option 'limits.row'; did you mean 'limits.rows'?"));
  EXPECT_THAT(message, HasSubstr("FULGUR__LR: 'x' is not a number"));
  EXPECT_THAT(message, HasSubstr("--lr must be at least 0; got -1"));
  EXPECT_THAT(message, HasSubstr("unknown flag 'titel'; did you mean 'title'?"));
}

// What a program adds to the registry, as fulgur's own.
struct CountsDown final : Callback {
  struct Options {
    int64_t from = 3;
    Limits limits;
    void describe(FieldVisitor& visit) {
      visit({.name = "limits", .help = "how much to count"}, &limits);
      visit({.name = "from", .help = "first number", .min = 1}, &from);
    }
  };
  explicit CountsDown(Options given) : options(given) {}
  static std::shared_ptr<CountsDown> make(Options options) {
    if (options.from == 13) throw UsageError("CountsDown: 13 brings bad luck");
    return std::make_shared<CountsDown>(options);
  }
  Options options;
};

class ConfigOfCallbacks : public ConfigTest {
 protected:
  static void SetUpTestSuite() { callback_registry().add<CountsDown>(); }
  const std::string run_ = file("run.toml", R"([trainer]
max_epochs = 1
[[callbacks]]
type = "EarlyStopping"
monitor = "loss"
patience = 5
[[callbacks]]
from = 7
type = "countsdown"
[callbacks.limits]
rows = 4
[[loggers]]
type = "TensorBoardLogger"
)");
};

TEST_F(ConfigOfCallbacks, AreMadeInTheirOrder) {
  const auto callbacks = parse({"--config=" + run_}).trainer.callbacks;
  ASSERT_EQ(callbacks.size(), 3);
  EXPECT_EQ(callbacks[0]->state_key(), "monitor=loss,patience=5");
  EXPECT_EQ(std::dynamic_pointer_cast<CountsDown>(callbacks[1])->options.from, 7);
  EXPECT_EQ(std::dynamic_pointer_cast<CountsDown>(callbacks[1])->options.limits.rows, 4);
  EXPECT_NE(std::dynamic_pointer_cast<TensorBoardLogger>(callbacks[2]), nullptr);
}

TEST_F(ConfigOfCallbacks, AListOfALaterFileReplacesThatOfAnEarlierOne) {
  const std::string more = file("more.toml", "[[trainer.callbacks]]\ntype = \"LearningRateMonitor\"\n");
  const auto callbacks = parse({"--config=" + run_, "--config=" + more}).trainer.callbacks;
  ASSERT_EQ(callbacks.size(), 2);
  EXPECT_NE(std::dynamic_pointer_cast<LearningRateMonitor>(callbacks[0]), nullptr);
}

TEST_F(ConfigOfCallbacks, AnEmptyListLeavesNoneAndAnEmptySectionChangesNothing) {
  const std::string none = file("none.toml", "callbacks = []\n[trainer]\n[limits]\n");
  const auto callbacks = parse({"--config=" + run_, "--config=" + none}).trainer.callbacks;
  ASSERT_EQ(callbacks.size(), 1);
  EXPECT_NE(std::dynamic_pointer_cast<TensorBoardLogger>(callbacks[0]), nullptr);
  EXPECT_EQ(parse({"--config=" + run_, "--config=" + run_}).trainer.callbacks.size(), 3);
}

TEST_F(ConfigOfCallbacks, ArePrintedAndReadAgain) {
  const std::string text = printed({"--config=" + run_});
  EXPECT_THAT(text, ::testing::ContainsRegex(R"(
\[\[trainer.callbacks\]\]
type = "EarlyStopping" +# .*:4:8
)"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nmonitor = \"loss\" +# .*:5:11\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nfrom = 7 +# .*:8:8\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\n\\[trainer.callbacks.limits\\]\nrows = 4 +# .*:11:8\ncolumns = "));
  const auto callbacks = parse({"--config=" + file("printed.toml", text)}).trainer.callbacks;
  ASSERT_EQ(callbacks.size(), 3);
  EXPECT_EQ(callbacks[0]->state_key(), "monitor=loss,patience=5");
  const auto counts_down = std::dynamic_pointer_cast<CountsDown>(callbacks[1]);
  ASSERT_NE(counts_down, nullptr);
  EXPECT_EQ(counts_down->options.from, 7);
  EXPECT_EQ(counts_down->options.limits.rows, 4);
}

TEST_F(ConfigOfCallbacks, WhatIsWrongIsSaidWithItsPlace) {
  const std::string wrong = file("wrong.toml", R"([[callbacks]]
type = "EarlyStoping"
[[callbacks]]
monitor = "loss"
[[callbacks]]
type = "EarlyStopping"
monitr = "loss"
patience = "many"
[[callback]]
type = "EarlyStopping"
[[trainer.max_epochs]]
n = 1
)");
  const std::string message = refusal({"--config=" + wrong});
  const auto at = [&](const std::string& rest) { return HasSubstr(wrong + rest); };
  EXPECT_THAT(message, ::testing::StartsWith("6 things are wrong:"));
  EXPECT_THAT(message, at(":2:8: unknown callback 'EarlyStoping'; did you mean 'EarlyStopping'? known: "));
  EXPECT_THAT(message, at(":3:1: trainer.callbacks needs a type, such as type = \"BackboneFinetuning\""));
  EXPECT_THAT(message, at(":7:10: unknown option 'monitr'; did you mean 'monitor'?"));
  EXPECT_THAT(message, at(":8:12: patience must be a whole number; got the text \"many\""));
  EXPECT_THAT(message, at(":9:1: unknown option 'callback'; did you mean 'callbacks'?"));
  EXPECT_THAT(message, at(":11:1: trainer.max_epochs is one value, not a list of tables"));
  EXPECT_THAT(refusal({"--config=" + file("made.toml", "[[callbacks]]\ntype = \"CountsDown\"\nfrom = 13\n")}),
              HasSubstr("made.toml:1:1: CountsDown: 13 brings bad luck"));
}

// A config can make all of fulgur's callbacks, but for those whose options are functions or maps.
TEST_F(ConfigOfCallbacks, HaveAllThatThereAre) {
  for (const std::string& name : callback_registry().names()) {
    SCOPED_TRACE(name);
    const std::string needs = name == "EarlyStopping" ? "monitor = \"loss\"\n" : "";
    const auto made = parse({"--config=" + file("one.toml", "[[callbacks]]\ntype = \"" + name + "\"\n" + needs)});
    EXPECT_EQ(made.trainer.callbacks.size(), 1);
  }
  EXPECT_GE(callback_registry().names().size(), 18);
}

TEST_F(ConfigTest, FilesThatCannotBeReadAreNamed) {
  EXPECT_EQ(refusal({"--config=" + path("no.toml")}), "--config: there is no file '" + path("no.toml") + "'");
  EXPECT_THAT(refusal({"--config=" + file("a.toml", "lr = \n")}), HasSubstr("a.toml:1:6: this is no TOML: "));
  EXPECT_THAT(refusal({"--config=" + file("b.toml", "lr = 1\nlr = 2\n")}), HasSubstr("b.toml:2:"));
  for (const char* list : {"[\"1,2\", 3]", "[\"\"]", "[1, [2]]", "[{a = 1}, 2]"}) {
    EXPECT_THAT(refusal({"--config=" + file("list.toml", "widths = " + std::string(list) + "\n")}),
                HasSubstr("list.toml:1:10: widths must be text, a number"))
        << list;
  }
  EXPECT_THAT(refusal({"--config=" + file("c.toml", "include = 3\n")}), HasSubstr("include must be a file name"));
  EXPECT_THAT(refusal({"--config=" + file("d.toml", "include = \"no.toml\"\n")}),
              HasSubstr("d.toml:1:11: there is no file"));
}

}  // namespace
}  // namespace fulgur
