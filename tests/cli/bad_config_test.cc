// What a user gets to read for each kind of mistake in a config file, a variable or a flag, word for word.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/trainer/trainer_options.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

enum class Shape { round, square };

struct ModelOptions {
  double lr = 1e-3;
  int64_t width = 8;
  bool bias = true;
  std::string title = "x";
  std::vector<int64_t> widths{4, 2};
  std::pair<double, double> betas{0.9, 0.99};
  Shape shape = Shape::round;
  std::vector<Shape> shapes{};
  void describe(FieldVisitor& visit) {
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
    visit({.name = "width", .help = "hidden units", .min = 1}, &width);
    visit({.name = "bias", .help = "whether layers have a bias"}, &bias);
    visit({.name = "title", .help = "title of the model"}, &title);
    visit({.name = "widths", .help = "hidden units of each layer", .min = 1}, &widths);
    visit({.name = "betas", .help = "two decays", .min = 0, .max = 1}, &betas);
    visit({.name = "shape", .help = "shape of the kernel", .choices = {"round", "square"}}, &shape);
    visit({.name = "shapes", .help = "shapes of further kernels", .choices = {"round", "square"}}, &shapes);
  }
};

struct Options {
  TrainerOptions trainer;
  ModelOptions model;
  uint64_t seed = 1;
  void describe(FieldVisitor& visit) {
    visit({.name = "model", .help = "the model"}, &model);
    visit({.name = "trainer", .help = "how to train"}, &trainer);
    visit({.name = "seed", .help = "seed of the weights"}, &seed);
  }
};

struct Row {
  std::string toml{};  // the file run.toml; empty: there is none
  std::vector<std::string> flags{};
  EnvironmentVariables variables{};
  std::string message;
};

const std::vector<Row> kRows{
    {.toml = "lr = ",
     .message = "run.toml:1:6: this is no TOML: Error while parsing key-value pair: encountered end-of-file"},
    {.toml = "[model\nlr = 1",
     .message = "run.toml:1:7: this is no TOML: Error while parsing table header: expected ']', saw '\\n'"},
    {.toml = "lr = 1\nlr = 2",
     .message = "run.toml:2:6: this is no TOML: Error while parsing key-value pair: cannot redefine existing "
                "integer 'lr'"},
    {.toml = "[model]\nlr = 1\n[model]\nwidth = 2",
     .message = "run.toml:3:1: this is no TOML: Error while parsing table header: cannot redefine existing "
                "table 'model'"},
    {.toml = "text = \"no end",
     .message = "run.toml:1:15: this is no TOML: Error while parsing string: encountered end-of-file"},
    {.toml = "a = 1979-13-40",
     .message = "run.toml:1:12: this is no TOML: Error while parsing date: expected month between 1 and 12 "
                "(inclusive), saw 13"},
    {.toml = "model.lr = 1\nmodel = 3",
     .message = "run.toml:2:9: this is no TOML: Error while parsing key-value pair: cannot redefine existing "
                "table 'model'"},
    {.toml = "include = 3", .message = "run.toml:1:11: include must be a file name or a list of them"},
    {.toml = "include = [\"a.toml\", 4]",
     .message = "2 things are wrong:\n  run.toml:1:11: there is no file 'a.toml'\n  run.toml:1:11: include must "
                "be a file name or a list of them"},
    {.toml = "include = \"missing.toml\"", .message = "run.toml:1:11: there is no file 'missing.toml'"},
    {.toml = "include = \"run.toml\"", .message = "run.toml:1:11: 'run.toml' includes itself: run.toml -> run.toml"},
    {.toml = "lerning_rate = 1", .message = "run.toml:1:16: unknown option 'lerning_rate'; --help=all lists all"},
    {.toml = "[model]\nlerning_rate = 1",
     .message = "run.toml:2:16: unknown option 'model.lerning_rate'; there are model.lr, model.width, "
                "model.bias, model.title, model.widths, model.betas, model.shape, model.shapes"},
    {.toml = "[modle]\nlr = 1", .message = "run.toml:2:6: unknown option 'modle.lr'; did you mean 'model.lr'?"},
    {.toml = "[trainer]\nmax_epoch = 3",
     .message = "run.toml:2:13: unknown option 'trainer.max_epoch'; did you mean 'trainer.max_epochs'?"},
    {.toml = "max_epoch = 3", .message = "run.toml:1:13: unknown option 'max_epoch'; did you mean 'max_epochs'?"},
    {.toml = "[trainer.strategi]\ntype = \"ddp\"",
     .message = "run.toml:2:8: unknown option 'trainer.strategi.type'; --help=all lists all"},
    {.toml = "[strategy]\nbucket_cap = 3",
     .message = "run.toml:2:14: unknown option 'strategy.bucket_cap'; did you mean 'strategy.bucket_cap_mib'?"},
    {.toml = "[[callback]]\ntype = \"EarlyStopping\"",
     .message = "run.toml:1:1: unknown option 'callback'; did you mean 'callbacks'?"},
    {.toml = "qwertyuiop = 1", .message = "run.toml:1:14: unknown option 'qwertyuiop'; --help=all lists all"},
    {.toml = "[model]\nlr = \"fast\"", .message = "run.toml:2:6: model.lr must be a number; got the text \"fast\""},
    {.toml = "[model]\nlr = true", .message = "run.toml:2:6: model.lr: 'true' is not a number"},
    {.toml = "[model]\nwidth = 2.5", .message = "run.toml:2:9: model.width: '2.5' is not a whole number"},
    {.toml = "[model]\nwidth = \"8\"",
     .message = "run.toml:2:9: model.width must be a whole number; got the text \"8\""},
    {.toml = "[model]\nbias = 2", .message = "run.toml:2:8: model.bias: '2' is not true or false"},
    {.toml = "[model]\nbias = \"yes\"",
     .message = "run.toml:2:8: model.bias must be true or false; got the text \"yes\""},
    {.toml = "[model]\ntitle = {a = 1}", .message = "run.toml:2:14: model.title is one value, not a table"},
    {.toml = "[model]\nwidths = [1, [2]]",
     .message = "run.toml:2:10: model.widths must be text, a number, true or false, or a list of these, of "
                "which none is empty or has a comma"},
    {.toml = "[model]\nwidths = [1, \"x\"]",
     .message = "run.toml:2:10: model.widths: element 1: 'x' is not a whole number"},
    {.toml = "[model]\nwidths = \"1,,2\"",
     .message = "run.toml:2:10: model.widths: element 1: '' is not a whole number"},
    {.toml = "[model]\nbetas = 0.9",
     .message = "run.toml:2:9: model.betas: this is a pair, such as 0.9,0.95; got 1 values"},
    {.toml = "[model]\nlr = 1979-05-27",
     .message = "run.toml:2:6: model.lr must be text, a number, true or false, or a list of these, of which "
                "none is empty or has a comma"},
    {.toml = "model = 3", .message = "run.toml:1:9: model is a section; write [model]"},
    {.toml = "[trainer]\nmax_epochs = [1, 2]",
     .message = "run.toml:2:14: trainer.max_epochs: '1,2' is not a whole number"},
    {.toml = "[[seed]]\na = 1", .message = "run.toml:1:1: seed is one value, not a list of tables"},
    {.toml = "[model]\nlr = -1", .message = "run.toml:2:6: model.lr must be at least 0; got -1"},
    {.toml = "[model]\nwidth = 0", .message = "run.toml:2:9: model.width must be at least 1; got 0"},
    {.toml = "[model]\nwidth = 99999999999999999999",
     .message = "run.toml:2:29: this is no TOML: Error while parsing decimal integer: '99999999999999999999' is "
                "not representable in 64 bits"},
    {.toml = "[model]\nwidths = [4, 0]", .message = "run.toml:2:10: model.widths: element 1 must be at least 1; got 0"},
    {.toml = "[model]\nshape = \"oval\"",
     .message = "run.toml:2:9: model.shape: unknown value 'oval'; known: round, square"},
    {.toml = "[model]\nshapes = [\"round\", \"oval\"]",
     .message = "run.toml:2:10: model.shapes: element 1: unknown value 'oval'; known: round, square"},
    {.toml = "[trainer]\naccelerator = \"tpu\"",
     .message = "run.toml:2:15: unknown trainer.accelerator 'tpu'; did you mean 'cpu'? known: auto, cpu, cuda, gpu"},
    {.toml = "[trainer]\ndevices = \"two\"",
     .message = "run.toml:2:11: trainer.devices: 'two' is not a count of devices (4), a list of them (0,2) or "
                "'auto'"},
    {.toml = "[trainer]\nlimit_train_batches = \"110%\"",
     .message = "run.toml:2:23: trainer.limit_train_batches must be a Fraction between 0 and 1, or a number of "
                "Batches; got 1.1"},
    {.toml = "[trainer]\nmax_time = \"soon\"",
     .message = "run.toml:2:12: trainer.max_time: 'soon' is not a time span; write DD:HH:MM:SS, such as "
                "00:12:00:00 for 12 hours"},
    {.toml = "seed = -1", .message = "run.toml:1:8: seed: '-1' is not a whole number from 0 to 18446744073709551615"},
    {.toml = "[strategy]\ntype = \"single_device\"\ntimeout_s = 3",
     .message =
         "run.toml:3:13: strategy.timeout_s is set, but strategy is single_device, which does not use it; leave it "
         "out, or write strategy = ddp, or ddp_sharded, or delayed_update, or zero_offload"},
    {.toml = "[strategy]\ntype = \"ddp\"\ntimeout_s = 0",
     .message = "run.toml:3:13: strategy.timeout_s must be at least 1; got 0"},
    {.toml = "[strategy]\ntype = \"dpp\"",
     .message = "run.toml:2:8: strategy.type: unknown strategy 'dpp'; did you mean 'ddp'? known: auto, ddp, "
                "ddp_sharded, delayed_update, dp, single_device, zero_offload"},
    {.toml = "[optimizer]\nlr = 1",
     .message =
         "run.toml:2:6: optimizer.lr is set, but optimizer is none, which does not use it; leave it out, or write "
         "optimizer = AdamW, or Adam, or SGD, or Adagrad, or LAMB, or LARS, or Lion, or RMSprop"},
    {.toml = "[optimizer]\ntype = \"SGD\"\nbetas = [0.9, 0.99]",
     .message = "run.toml:3:9: optimizer.betas is set, but optimizer is SGD, which does not use it; leave it out, or "
                "write optimizer = AdamW, or Adam, or LAMB, or Lion"},
    {.toml = "[optimizer]\ntype = \"AdamW\"\nbetas = [0.9]",
     .message = "run.toml:3:9: optimizer.betas: this is a pair, such as 0.9,0.95; got 1 values"},
    {.toml = "[scheduler]\ntype = \"StepRL\"",
     .message = "run.toml:2:8: scheduler.type: unknown scheduler 'StepRL'; did you mean 'StepLR'? known: none, "
                "ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, LinearLR, "
                "MultiStepLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau, StepLR, WarmupCosineLR, "
                "WarmupLinearLR"},
    {.toml = "[[callbacks]]\nmonitor = \"x\"",
     .message = "run.toml:1:1: trainer.callbacks needs a type, such as type = \"BackboneFinetuning\""},
    {.toml = "[[callbacks]]\ntype = \"EarlyStoping\"",
     .message = "run.toml:2:8: unknown callback 'EarlyStoping'; did you mean 'EarlyStopping'? known: "
                "BackboneFinetuning, CSVLogger, DeviceStatsMonitor, DivergenceGuard, EarlyStopping, "
                "EvaluationTable, GradientNormMonitor, JsonLinesLogger, KinetoProfiler, LearningRateMonitor, "
                "ModelCheckpoint, ModelSummary, OnExceptionCheckpoint, PredictionWriter, ProgressBar, "
                "TensorBoardLogger, ThroughputMonitor, WeightAveraging"},
    {.toml = "[[callbacks]]\ntype = \"EarlyStopping\"\nmonitr = \"x\"",
     .message = "run.toml:3:10: unknown option 'monitr'; did you mean 'monitor'?"},
    {.toml = "[[callbacks]]\ntype = \"EarlyStopping\"\npatience = 0",
     .message = "run.toml:3:12: patience must be at least 1; got 0"},
    {.toml = "[[callbacks]]\ntype = \"EarlyStopping\"\nmonitor = \"x\"\nmode = \"up\"",
     .message = "run.toml:4:8: unknown mode 'up'; known: min, max"},
    {.toml = "[[callbacks]]\ntype = 3",
     .message = "run.toml:2:8: unknown callback '3'; known: BackboneFinetuning, CSVLogger, DeviceStatsMonitor, "
                "DivergenceGuard, EarlyStopping, EvaluationTable, GradientNormMonitor, JsonLinesLogger, "
                "KinetoProfiler, LearningRateMonitor, ModelCheckpoint, ModelSummary, OnExceptionCheckpoint, "
                "PredictionWriter, ProgressBar, TensorBoardLogger, ThroughputMonitor, WeightAveraging"},
    {.toml = "[[callbacks]]\ntype = \"ModelSummary\"\n[[trainer.callbacks]]\ntype = \"ProgressBar\"",
     .message = "run.toml:3:1: callbacks and trainer.callbacks are the same list; write one"},
    {.toml = "[[callbacks]]\ntype = \"ModelSummary\"\n\"\" = 3",
     .message = "run.toml:3:6: unknown option ''; --help=all lists all"},
    {.toml = "[callbacks]\ntype = \"ModelSummary\"",
     .message = "run.toml:2:8: callbacks is a list of tables; write [[callbacks]]"},
    {.toml = "[trainr]", .message = "run.toml:1:1: unknown option 'trainr'; --help=all lists all"},
    {.toml = "[model]\ntitle = 1.10", .message = "run.toml:2:9: model.title is text; write it in quotes"},
    {.toml = "[trainer]\nlimit_train_batches = 1.0",
     .message = "run.toml:2:23: trainer.limit_train_batches: '1.0' is not a number of batches (10) nor a part of the "
                "epoch (10%)"},
    {.toml = "[model]\nwidth = 8.0", .message = "run.toml:2:9: model.width: '8.0' is not a whole number"},
    {.toml = "[optimizer]\nname = \"AdamW\"",
     .message = "run.toml:2:8: unknown option 'optimizer.name'; did you mean 'optimizer.type'?"},
    {.toml = "callbacks = 3", .message = "run.toml:1:13: callbacks is a list of tables; write [[callbacks]]"},
    {.toml = "[[optimizer.groups]]\nmach = \"*.bias\"",
     .message = "run.toml:2:8: unknown option 'mach'; did you mean 'match'?"},
    {.variables = {{"FULGUR_TRAINER__MAX_EPOCH", "3"}},
     .message = "FULGUR_TRAINER__MAX_EPOCH: unknown option 'trainer.max_epoch'; did you mean 'trainer.max_epochs'?"},
    {.variables = {{"FULGUR_MODEL__LR", "fast"}}, .message = "FULGUR_MODEL__LR: 'fast' is not a number"},
    {.variables = {{"FULGUR_MODEL__WIDTH", "0"}}, .message = "FULGUR_MODEL__WIDTH must be at least 1; got 0"},
    {.flags = {"--model.lr=fast"}, .message = "--model.lr: 'fast' is not a number"},
    {.flags = {"--max_epohcs=3"}, .message = "unknown flag 'max_epohcs'; did you mean 'max_epochs'?"},
    {.flags = {"--callbacks=x"},
     .message = "unknown flag 'callbacks'; it is a list; write [[callbacks]] in a file for --config"},
    {.flags = {"--model.lr"}, .message = "--model.lr needs a value; write --model.lr=value"},
    {.flags = {"--config=missing.toml"}, .message = "--config: there is no file 'missing.toml'"},
    {.flags = {"--config"}, .message = "--config needs a value; write --config=value"},
    {.flags = {"fitt"}, .message = "unexpected argument 'fitt'; flags are written --name=value"},
    {.flags = {"--model.shape=oval"}, .message = "--model.shape: unknown value 'oval'; known: round, square"},
    {.flags = {"--strategy.timeout_s=x"}, .message = "--strategy.timeout_s: 'x' is not a number"},
};

TEST(BadConfig, IsToldWordForWord) {
  const testing::TempDir dir;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(dir.path());  // messages have the file as it was named
  for (const Row& row : kRows) {
    std::vector<std::string> arguments = row.flags;
    if (!row.toml.empty()) {
      std::ofstream("run.toml") << row.toml;
      arguments.emplace_back("--config=run.toml");
    }
    Options options;
    const auto parse = [&] {
      parse_flags(arguments, "program", [&](FieldVisitor& visit) { options.describe(visit); }, row.variables);
    };
    EXPECT_EQ(testing::message_of<UsageError>(parse), row.message) << row.toml;
  }
  std::filesystem::current_path(before);
  EXPECT_GE(kRows.size(), 50u);
}

}  // namespace
}  // namespace fulgur
