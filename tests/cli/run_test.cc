// cli::run: the commands of a program, what they leave in the run's folder, and what they refuse.
#include "fulgur/cli/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/version.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fulgur/base/version.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/throughput_monitor.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/core/module.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tensor_dataset.h"
#include "fulgur/optim/adam.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct NetOptions {
  int64_t width = 8;
  double lr = 1e-2;
  void describe(FieldVisitor& visit) {
    visit({.name = "width", .help = "hidden units", .min = 1}, &width);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  }
};

struct Net : Module {
  using Options = NetOptions;
  Options options;
  torch::nn::Linear hidden{nullptr}, out{nullptr};

  explicit Net(Options given) : options(given) {
    hidden = register_module("hidden", torch::nn::Linear(4, options.width));
    out = register_module("out", torch::nn::Linear(options.width, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return out->forward(hidden->forward(x).tanh()); }
  at::Tensor loss(const Batch& batch) { return torch::nn::functional::mse_loss(forward(batch["x"]), batch["y"]); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = loss(batch);
    log("train_loss", value);
    return value;
  }
  void validation_step(const Batch& batch, int64_t) override { log("val_loss", loss(batch)); }
  void test_step(const Batch& batch, int64_t) override { log("test_loss", loss(batch)); }
  Batch predict_step(const Batch& batch, int64_t) override { return {{"y", forward(batch["x"])}}; }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = options.lr}); }
};

struct NetDataOptions {
  int64_t batch_size = 8, width_of_net = 0;
  void describe(FieldVisitor& visit) {
    visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
  }
};

struct NetData : DataModule {
  using Options = NetDataOptions;
  Options options;
  uint64_t seed;
  std::shared_ptr<TensorDataset> dataset{};
  static inline int num_alive = 0, most_alive = 0;

  NetData(Options given, uint64_t given_seed) : options(given), seed(given_seed) {
    most_alive = std::max(most_alive, ++num_alive);
  }
  ~NetData() override { --num_alive; }
  void setup(EntryPoint) override {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const at::Tensor x = torch::randn({48, 4}, generator);
    dataset = TensorDataset::make({{"x", x}, {"y", x.sum(1, /*keepdim=*/true).sin()}});
  }
  std::shared_ptr<Loader> loader() { return DataLoader::make(dataset, {.batch_size = options.batch_size}); }
  std::shared_ptr<Loader> train_dataloader() override { return loader(); }
  LoaderList val_dataloader() override { return loader(); }
  LoaderList test_dataloader() override { return loader(); }
  LoaderList predict_dataloader() override { return loader(); }
};

std::string read(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class RunTest : public ::testing::Test {
 protected:
  struct Outcome {
    int exit_code;
    std::string out, err;
  };

  Outcome run(std::vector<std::string> arguments, cli::Program<Net, NetData> program = {}) {
    for (const char* quiet : {"--enable_progress_bar=false", "--enable_model_summary=false"}) {
      arguments.emplace_back(quiet);
    }
    return run_as_by_default(arguments, std::move(program));
  }

  // Shows the progress bar and the model summary, unless the arguments say otherwise.
  Outcome run_as_by_default(const std::vector<std::string>& arguments, cli::Program<Net, NetData> program = {}) {
    std::vector<std::string> words{"program"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    words.emplace_back("--accelerator=cpu");
    words.push_back("--default_root_dir=" + dir_.path().string());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    if (!program.trainer.max_epochs) program.trainer.max_epochs = 2;
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int exit_code =
        cli::run<Net, NetData>(static_cast<int>(pointers.size()), pointers.data(), std::move(program));
    Outcome outcome{.exit_code = exit_code, .out = "", .err = ""};
    outcome.out = ::testing::internal::GetCapturedStdout();
    outcome.err = ::testing::internal::GetCapturedStderr();
    return outcome;
  }

  fs::path run_dir(const std::string& name) const { return dir_.path() / "runs" / name; }

  const testing::TempDir dir_;
};

TEST_F(RunTest, FitIsTheCommandIfNoneIsGiven) {
  for (const std::vector<std::string>& command : {std::vector<std::string>{}, {"fit"}}) {
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("\n12 optimizer steps in "));
    EXPECT_THAT(outcome.out, HasSubstr("next: program test --ckpt_path="));
  }
  const std::string first = read(run_dir("version_0") / "metrics.csv");
  EXPECT_THAT(first, StartsWith("epoch,step"));
  EXPECT_EQ(read(run_dir("version_1") / "metrics.csv"), first);
}

TEST_F(RunTest, APrintedConfigTrainsTheSameAndSoDoesTheOneOfARun) {
  ASSERT_EQ(run({"--model.width=5", "--max_epochs=3", "--seed=4", "--name=a"}).exit_code, 0);
  ASSERT_EQ(run({"--config=" + (run_dir("a") / "config.toml").string(), "--name=b"}).exit_code, 0);
  EXPECT_EQ(read(run_dir("a") / "metrics.csv"), read(run_dir("b") / "metrics.csv"));
  ASSERT_EQ(run({"--model.width=5", "--max_epochs=3", "--seed=5", "--name=c"}).exit_code, 0);
  EXPECT_NE(read(run_dir("a") / "metrics.csv"), read(run_dir("c") / "metrics.csv"));
}

TEST_F(RunTest, TrainsInAFolderWhoseNameIsNoUtf8) {
  const Outcome outcome = run({"--name=caf\xe9", "--max_epochs=1"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(fs::exists(run_dir("caf\xe9") / "metrics.csv"));
}

TEST_F(RunTest, LeavesInTheFolderWhatItTakesToRunItAgain) {
  ASSERT_EQ(run({"--name=a", "--max_epochs=1"}).exit_code, 0);
  EXPECT_THAT(read(run_dir("a") / "config.toml"),
              HasSubstr("max_epochs = 1                                    # --max_epochs"));
  const auto environment = nlohmann::json::parse(read(run_dir("a") / "env.json"));
  EXPECT_THAT(environment.at("command_line").get<std::string>(), StartsWith("program --name=a --max_epochs=1"));
  EXPECT_EQ(environment.at("world_size"), 1);
  EXPECT_THAT(environment.at("strategy_and_devices").get<std::string>(), StartsWith("single_device on cpu"));
  EXPECT_EQ(environment.at("libtorch"), TORCH_VERSION);
  EXPECT_EQ(environment.at("fulgur"), FULGUR_VERSION);
  EXPECT_EQ(fs::read_symlink(run_dir("latest")), "a");

  const std::string first = read(run_dir("a") / "config.toml");
  const Outcome longer = run({"--name=a", "--max_epochs=2", "--ckpt_path=last"});
  EXPECT_THAT(longer.out, HasSubstr("\n6 optimizer steps in "));  // only those of this fit are counted
  EXPECT_THAT(longer.out,
              ::testing::ContainsRegex("\nlast metrics\ntrain_loss  0\\.[0-9]+\nval_loss    0\\.[0-9]+\n\n"));
  EXPECT_THAT(longer.err,
              HasSubstr("this run has other options than the last one in its folder (config-v1.toml has them all): "
                        "trainer.ckpt_path:  -> last, trainer.max_epochs: 1 -> 2\n"));
  EXPECT_EQ(read(run_dir("a") / "config.toml"), first);
  EXPECT_TRUE(fs::exists(run_dir("a") / "env-v1.json"));

  const Outcome other_strategy =
      run({"--name=a", "--max_epochs=2", "--ckpt_path=last", "--strategy=ddp", "--strategy.bucket_cap_mib=1"});
  EXPECT_THAT(other_strategy.err, HasSubstr("has them all): trainer.strategy.bucket_cap_mib: 1, "
                                            "trainer.strategy.type: auto -> ddp\n"));  // and none of its defaults

  const Outcome other_lr = run({"--name=a", "--max_epochs=3", "--ckpt_path=last", "--model.lr=0.5"});
  EXPECT_THAT(other_lr.err, HasSubstr("the learning rate 0.01 of the checkpoint is kept, instead of 0.5: "));
  EXPECT_THAT(longer.err, ::testing::Not(HasSubstr("the learning rate")));
  EXPECT_TRUE(fs::exists(run_dir("a") / "config-v3.toml"));

  EXPECT_THAT(run({"--name=a", "--max_epochs=3", "--ckpt_path=last", "--model.lr=0.5"}).err,
              ::testing::Not(HasSubstr("other options")));
  EXPECT_FALSE(fs::exists(run_dir("a") / "config-v4.toml"));
  ASSERT_EQ(run({}).exit_code, 0);
  EXPECT_EQ(fs::read_symlink(run_dir("latest")), "version_0");
}

TEST_F(RunTest, TheNextCommandHasTheDataAndTheSeedOfTheRun) {
  for (const char* option : {"--seed=3", "--data.batch_size=6"}) {
    const Outcome outcome = run({option, "--name=run"});
    EXPECT_THAT(outcome.out, ContainsRegex("next: program test --config=[^ ]*/run/config(-v1)?.toml --ckpt_path="));
  }
}

TEST_F(RunTest, HelpListsTheCommandsThatTheModuleHasAStepFor) {
  struct OnlyTrains : Module {
    at::Tensor training_step(const Batch& batch, int64_t) override { return batch["x"].sum(); }
  };
  EXPECT_THAT(run({"--help"}).out, ContainsRegex("\n  validate .*\n  test .*\n  predict "));
  std::string program = "program", help = "--help";
  char* words[] = {program.data(), help.data()};
  ::testing::internal::CaptureStdout();
  EXPECT_EQ((cli::run<OnlyTrains, NetData>(2, words)), 0);
  EXPECT_THAT(::testing::internal::GetCapturedStdout(),
              ::testing::AllOf(HasSubstr("\n  fit "), ::testing::Not(ContainsRegex("\n  (validate|test|predict) "))));
}

TEST_F(RunTest, TheCommandLineIsWrittenAsAShellTakesIt) {
  const Outcome outcome = run({"--name=it's a run"});
  ASSERT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.out, ContainsRegex("next: program test '--ckpt_path=[^ ]*it'\\\\''s a run/"));
  const auto environment = nlohmann::json::parse(read(run_dir("it's a run") / "env.json"));
  EXPECT_THAT(environment.at("command_line").get<std::string>(), StartsWith("program '--name=it'\\''s a run' --"));
}

TEST_F(RunTest, EvaluationFindsTheFolderOfAModelCheckpointAmongTheCallbacks) {
  const fs::path config = dir_.path() / "run.toml", folder = dir_.path() / "elsewhere";
  std::ofstream(config) << "[[callbacks]]\ntype = \"ModelCheckpoint\"\nmonitor = \"val_loss\"\ndirpath = \""
                        << folder.string() << "\"\n";
  ASSERT_EQ(run({"--config=" + config.string(), "--name=a", "--model.width=5"}).exit_code, 0);
  const Outcome tested = run({"test", "--config=" + config.string(), "--ckpt_path=best"});
  EXPECT_EQ(tested.exit_code, 0) << tested.err;
  EXPECT_THAT(tested.err, HasSubstr("loaded the weights of '" + folder.string()));
}

TEST_F(RunTest, NoFilesWhereNoneAreAskedFor) {
  EXPECT_EQ(run({"--fast_dev_run=1"}).exit_code, 0);
  EXPECT_FALSE(fs::exists(dir_.path() / "runs"));
}

TEST_F(RunTest, EvaluationTakesTheModelOptionsOfItsCheckpoint) {
  ASSERT_EQ(run({"--model.width=5", "--name=a"}).exit_code, 0);
  const std::string checkpoint = "--ckpt_path=" + (run_dir("a") / "checkpoints/last").string();
  for (const char* command : {"test", "validate", "predict"}) {
    const Outcome outcome = run({command, checkpoint});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
  for (const char* where : {"--ckpt_path=last", "--name=a"}) {  // the named run, or the newest that has one
    EXPECT_EQ(run({"test", "--ckpt_path=last", where}).exit_code, 0);
  }
  const Outcome other = run({"test", checkpoint, "--model.width=6"});  // what is given counts
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, HasSubstr("hidden.weight"));
  EXPECT_THAT(run({"test", checkpoint, "--print_config"}).out,
              ::testing::ContainsRegex("width = 5 +# .*/checkpoints/epoch=1-step=12\n"));
  EXPECT_EQ(load_hyper_parameters<NetOptions>(run_dir("a") / "checkpoints/last").width, 5);
}

TEST_F(RunTest, AFastTestRunTakesTheWeightsThatItIsGiven) {
  ASSERT_EQ(run({"--name=a", "--model.width=5"}).exit_code, 0);
  const Outcome outcome = run({"test", "--ckpt_path=last", "--name=a", "--fast_dev_run=2"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("warning")));
}

TEST_F(RunTest, EvaluationNeedsTrainedWeights) {
  const Outcome none = run({"test"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_EQ(
      none.err,
      "error: test needs trained weights: write --ckpt_path=best, --ckpt_path=last or the folder of a checkpoint\n");
  EXPECT_THAT(run({"validate", "--ckpt_path=best"}).err, HasSubstr("'best'"));
  EXPECT_THAT(run({"predict", "--ckpt_path=nowhere"}).err, HasSubstr("there is no checkpoint 'nowhere'"));
}

TEST_F(RunTest, PredictionsAreWrittenToFiles) {
  ASSERT_EQ(run({"--name=a"}).exit_code, 0);
  const Outcome outcome = run({"predict", "--ckpt_path=last", "--name=a"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(fs::exists(run_dir("a") / "predictions/rank0-part00000.safetensors"));
  EXPECT_THAT(outcome.out, HasSubstr("predictions: " + (run_dir("a") / "predictions").string()));
}

TEST_F(RunTest, FindersPrintWhatToWrite) {
  EXPECT_THAT(run({"find_lr"}).out, HasSubstr("suggested learning rate: "));
  NetData::most_alive = 0;
  EXPECT_THAT(run({"find-batch-size"}).out,
              HasSubstr("largest batch size: 64; write --data.batch_size=64\n"));  // 48 samples
  EXPECT_EQ(NetData::most_alive, 1);                                               // each may hold all of the data
}

TEST_F(RunTest, EstimatesMemoryOfTheModuleAlone) {
  const Outcome outcome = run({"estimate_memory", "--model.width=1000"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("8 devices, precision 32\n"));
  EXPECT_THAT(outcome.out,
              ::testing::ContainsRegex("single_device +0\\.024[0-9]* +0\\.024[0-9]* +0\\.048"));  // 6,001 parameters
  EXPECT_FALSE(fs::exists(dir_.path() / "runs"));
}

TEST_F(RunTest, LinkAndAfterFitAreCalled) {
  int64_t linked = 0, trained_width = 0;
  uint64_t seed = 0;
  const Outcome outcome = run({"--model.width=6", "--seed=9"},
                              {.link = [](NetOptions& model, NetDataOptions& data) { data.width_of_net = model.width; },
                               .after_fit =
                                   [&](Trainer& trainer, const std::shared_ptr<Net>& net, NetData& data) {
                                     EXPECT_EQ(trainer.state().global_step, 12);
                                     linked = data.options.width_of_net;
                                     trained_width = net->options.width;
                                     seed = data.seed;
                                   }});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(linked, 6);
  EXPECT_EQ(trained_width, 6);
  EXPECT_EQ(seed, 9);
}

TEST_F(RunTest, OptionsOfACheckpointThatIsNotMadeAreTold) {
  cli::Program<Net, NetData> program{.trainer = {.callbacks = {ModelCheckpoint::make()}}};
  EXPECT_THAT(run({"--checkpoint.save_top_k=3"}, program).err,
              HasSubstr("warning: callbacks has a ModelCheckpoint, so that the options of checkpoint are not used: "
                        "save_top_k=3\n"));
  EXPECT_THAT(run({}, program).err, ::testing::Not(HasSubstr("not used")));
  ASSERT_EQ(run({"--name=a", "--checkpoint.save_top_k=-1", "--max_epochs=3"}).exit_code, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(run_dir("a") / "checkpoints"), {}),
            4);  // one for each epoch, and the link last
}

TEST_F(RunTest, BarebonesLeavesOutTheCallbacksOfTheProgram) {
  cli::Program<Net, NetData> program{.trainer = {.callbacks = {ThroughputMonitor::make()}}};
  const Outcome outcome = run({"--barebones"}, program);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

TEST_F(RunTest, QuietLeavesOutTheCallbacksOfAFileThatPrint) {
  const std::string config = "--config=" + (dir_.path() / "run.toml").string();
  std::ofstream(dir_.path() / "run.toml") << R"(
[[callbacks]]
type = "ProgressBar"
[[callbacks]]
type = "ModelSummary"
[[callbacks]]
type = "EvaluationTable"
[[callbacks]]
type = "JsonLinesLogger"
)";
  const Outcome quiet = run_as_by_default({config, "--quiet", "--name=a"});
  EXPECT_EQ(quiet.exit_code, 0) << quiet.err;
  EXPECT_EQ(quiet.out, "");
  EXPECT_TRUE(fs::exists(run_dir("a") / "metrics.jsonl"));  // other callbacks stay
  const Outcome tested = run_as_by_default({"test", config, "--quiet", "--ckpt_path=last", "--name=a"});
  EXPECT_EQ(tested.exit_code, 0) << tested.err;
  EXPECT_EQ(tested.out, "");

  const Outcome asked = run_as_by_default({config, "--quiet", "--enable_progress_bar"});  // what is asked for stays
  EXPECT_EQ(asked.exit_code, 0) << asked.err;
  EXPECT_THAT(asked.out, HasSubstr("Epoch 2/2"));
  const Outcome refused = run_as_by_default({config, "--quiet", "--enable_model_summary=false"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("enable_model_summary is false, but callbacks has a ModelSummary"));
}

TEST_F(RunTest, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(run({"tran"}).exit_code, 2);
  EXPECT_THAT(run({"tset"}).err,
              StartsWith("error: unknown command 'tset'; did you mean 'test'? known: fit, validate, "));
  EXPECT_THAT(run({"--seed=1", "fit"}).err,
              HasSubstr("unexpected argument 'fit'; flags are written --name=value, and the command"));
  EXPECT_THAT(run({"--lr=1"}).err, HasSubstr("unknown flag 'lr'; did you mean 'model.lr'?"));
  EXPECT_THAT(run({"--help"}).out, HasSubstr("\nmodel\n  --model.width=8"));
}

}  // namespace
}  // namespace fulgur
