// Which checkpoint a run starts from, what happens if it does not fit, and which checkpoint a run ends with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/on_exception_checkpoint.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::at_batch_end;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::tiny_loader;
using testing::TinyModule;

class CheckpointPathTest : public ::testing::Test {
 protected:
  testing::TempDir dir;

  // Options of a run with five steps per epoch.
  TrainerOptions options(TrainerOptions given = {}) {
    given.default_root_dir = dir.path();
    if (!given.max_epochs) given.max_epochs = 2;
    given.accelerator = "cpu";
    given.enable_progress_bar = given.enable_model_summary = given.logger = false;
    return given;
  }
  int64_t steps_of(const TrainerOptions& given, std::shared_ptr<TinyModule> module = make_module<TinyModule>()) {
    Trainer trainer(options(given));
    trainer.fit(module, {.train = tiny_loader(), .val = tiny_loader()});
    return static_cast<int64_t>(module->train_losses.size());
  }
  fs::path checkpoints(const std::string& run) const { return dir.path() / "runs" / run / "checkpoints"; }
};

// The score is the number of steps that the weights have seen, in any process.
struct CountsSteps : TinyModule {
  at::Tensor steps;
  CountsSteps() { steps = register_buffer("steps", at::zeros({})); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    steps.add_(1);
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch& batch, int64_t batch_idx) override {
    TinyModule::validation_step(batch, batch_idx);
    log("seen", steps);
  }
  void test_step(const Batch&, int64_t) override { log("seen", steps); }
};

std::shared_ptr<Callback> ends_at_third(int signal) {
  return at_batch_end([signal, count = 0](TrainerControl&) mutable {
    if (++count == 3) std::raise(signal);
  });
}

std::shared_ptr<Callback> throws_at(int batch) {
  return at_batch_end([batch, count = 0](TrainerControl&) mutable {
    if (++count == batch) throw std::runtime_error("the test wants it");
  });
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

TEST_F(CheckpointPathTest, LastBeginsAnewWhereThereIsNoneAndElseGoesOn) {
  EXPECT_EQ(steps_of({.max_epochs = 1, .ckpt_path = "last"}), 5);
  EXPECT_EQ(steps_of({.max_epochs = 3, .ckpt_path = "last"}), 10);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(steps_of({.max_epochs = 3, .ckpt_path = "last"}), 0);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("nothing is left to train: the checkpoint has completed 3 epochs and 15 steps"));
  EXPECT_THAT(names_in(dir.path() / "runs"), ElementsAre("version_0", "version_1"));  // the third run wrote nothing
}

TEST_F(CheckpointPathTest, ARunWithANameHasOneFolder) {
  EXPECT_EQ(steps_of({.max_epochs = 1, .ckpt_path = "last", .name = "digits"}), 5);
  EXPECT_EQ(steps_of({.max_epochs = 2, .ckpt_path = "last", .name = "digits"}), 5);
  EXPECT_EQ(steps_of({.max_epochs = 2, .ckpt_path = "last", .name = "other"}), 10);
  EXPECT_EQ(names_in(dir.path() / "runs"), (std::vector<std::string>{"digits", "other"}));
  EXPECT_THAT(message_of<UsageError>([&] { steps_of({.name = "a/b"}); }), HasSubstr("name = 'a/b'"));
}

TEST_F(CheckpointPathTest, BestIsTheOneThatTheMonitorChose) {
  const auto checkpoint = ModelCheckpoint::make({.monitor = "val_loss", .save_top_k = -1});
  Trainer trainer(options({.max_epochs = 3, .name = "run", .callbacks = {checkpoint}}));
  trainer.fit(make_module<TinyModule>(), {.train = tiny_loader(), .val = tiny_loader()});
  EXPECT_EQ(fs::canonical(checkpoints("run") / "best"), fs::canonical(checkpoint->best_model_path()));
  EXPECT_EQ(fs::canonical(checkpoints("run") / "last").filename(), "epoch=2-step=15");
  const Metrics metrics = trainer.test(make_module<TinyModule>(), {.test = tiny_loader()}, "best");
  EXPECT_NEAR(metrics.at("test_loss"), checkpoint->best_model_score(), 1e-6);
}

// A run that is resumed again and again keeps no more checkpoints than one that was never interrupted.
TEST_F(CheckpointPathTest, FiveResumesLeaveTheBestAndTheNewest) {
  const auto run = [&](int64_t max_epochs) {
    steps_of({.max_epochs = max_epochs,
              .ckpt_path = "last",
              .name = "run",
              .callbacks = {ModelCheckpoint::make({.monitor = "seen"})}},
             make_module<CountsSteps>());
  };
  for (int64_t max_epochs = 1; max_epochs <= 6; ++max_epochs) run(max_epochs);
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("best", "epoch=0-step=5", "epoch=5-step=30", "last"));
  EXPECT_EQ(fs::canonical(checkpoints("run") / "best").filename(), "epoch=0-step=5");
}

TEST_F(CheckpointPathTest, FiveInterruptedRunsLeaveNoMoreThanOne) {
  for (int count = 0; count < 5; ++count) {
    EXPECT_THROW(steps_of({.max_epochs = 4, .ckpt_path = "last", .name = "run", .callbacks = {ends_at_third(SIGTERM)}}),
                 InterruptedError);
    EXPECT_EQ(
        std::ranges::count_if(names_in(checkpoints("run")), [](const auto& n) { return n.ends_with("-SIGTERM"); }), 1);
  }
  EXPECT_EQ(steps_of({.max_epochs = 4, .ckpt_path = "last", .name = "run"}), 5);
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("epoch=3-step=20", "last"));
}

TEST_F(CheckpointPathTest, TheOneThatASignalLeftStaysUntilThereIsANewerOne) {
  EXPECT_THROW(steps_of({.ckpt_path = "last", .name = "run", .callbacks = {ends_at_third(SIGINT)}}), InterruptedError);
  EXPECT_THROW(steps_of({.ckpt_path = "last", .name = "run", .callbacks = {throws_at(1)}}), std::runtime_error);
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("epoch=0-step=3-SIGINT", "last"));
  // A run cannot resume from weights alone.
  steps_of({.max_epochs = 1,
            .ckpt_path = "last",
            .name = "run",
            .callbacks = {ModelCheckpoint::make({.save_weights_only = true})}});
  EXPECT_TRUE(fs::exists(checkpoints("run") / "epoch=0-step=3-SIGINT"));
}

// The checkpoint stays, so that the same command can be run again.
TEST_F(CheckpointPathTest, TheOneThatCkptPathNamesStays) {
  steps_of({.max_epochs = 1, .name = "run"});
  const std::string path = checkpoints("run") / "epoch=0-step=5";
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(steps_of({.max_epochs = 2, .ckpt_path = path, .name = "run"}), 5);
    EXPECT_TRUE(fs::exists(path));
  }
}

TEST_F(CheckpointPathTest, OneSavedByHandStays) {
  const auto saves = at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().global_step == 2) trainer.save_checkpoint(checkpoints("run") / "mine", {.links = {"last"}});
    if (trainer.state().global_step == 3) throw std::runtime_error("the test wants it");
  });
  EXPECT_THROW(steps_of({.name = "run", .callbacks = {saves}}), std::runtime_error);
  EXPECT_EQ(steps_of({.ckpt_path = "last", .name = "run"}), 8);
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("epoch=1-step=10", "last", "mine"));
}

TEST_F(CheckpointPathTest, TheOneThatALinkLedToGoesOnceThereIsANewerOne) {
  steps_of({.max_epochs = 1, .name = "run"});
  steps_of({.max_epochs = 3, .ckpt_path = (checkpoints("run") / "last").string(), .name = "run"});
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("epoch=2-step=15", "last"));
}

TEST_F(CheckpointPathTest, KeepsThoseOfOtherRuns) {
  steps_of({.max_epochs = 1, .name = "a"});
  fs::copy(dir.path() / "runs/a", dir.path() / "runs/b", fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  steps_of({.max_epochs = 3, .ckpt_path = "last", .name = "b"});
  EXPECT_THAT(names_in(checkpoints("a")), ElementsAre("epoch=0-step=5", "last"));
  EXPECT_THAT(names_in(checkpoints("b")), ElementsAre("epoch=2-step=15", "last"));
  for (const int64_t max_epochs : {4, 5}) {  // without a name fit goes on from the newest run, in a folder of its own
    EXPECT_EQ(steps_of({.max_epochs = max_epochs, .ckpt_path = "last"}), 5);
  }
  EXPECT_THAT(names_in(checkpoints("b")), ElementsAre("epoch=2-step=15", "last"));
  EXPECT_THAT(names_in(checkpoints("version_0")), ElementsAre("epoch=3-step=20", "last"));
  EXPECT_THAT(names_in(checkpoints("version_1")), ElementsAre("epoch=4-step=25", "last"));
}

TEST_F(CheckpointPathTest, LastIsTheNewestWhateverItsScore) {
  struct Worsening : TinyModule {
    int64_t num_steps = 0;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      log("worse", static_cast<double>(++num_steps), {.on_step = false, .on_epoch = true});
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  steps_of({.max_epochs = 3, .name = "run", .callbacks = {ModelCheckpoint::make({.monitor = "worse"})}},
           make_module<Worsening>());
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("best", "epoch=0-step=5", "epoch=2-step=15", "last"));
  EXPECT_EQ(fs::canonical(checkpoints("run") / "best").filename(), "epoch=0-step=5");
  EXPECT_EQ(fs::canonical(checkpoints("run") / "last").filename(), "epoch=2-step=15");
}

TEST_F(CheckpointPathTest, AnOldOneThatIsDamagedStaysAndTheRunGoesOn) {
  const auto damages = at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().global_step == 7) std::ofstream(checkpoints("run") / "epoch=0-step=5" / kManifestName) << "{}";
  });
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(steps_of({.name = "run", .callbacks = {damages}}), 10);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("an old checkpoint stays"));
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("epoch=0-step=5", "epoch=1-step=10", "last"));
}

// Returns what `body` writes to the terminal.
template <class Body>
std::string said(const Body& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

// The score of the wrong model is worse than no score.
TEST_F(CheckpointPathTest, EvaluationLooksForLinksInNoOtherRun) {
  steps_of({.max_epochs = 1, .callbacks = {ModelCheckpoint::make({.monitor = "val_loss"})}});
  Trainer trainer(options({.max_epochs = 1}));
  const auto module = make_module<TinyModule>();
  const auto refusal = [&](const std::string& ckpt_path) {
    return message_of<UsageError>([&] { trainer.test(module, {.test = tiny_loader()}, ckpt_path); });
  };
  for (const char* link : {"best", "last"}) {
    EXPECT_THAT(refusal(link), AllOf(HasSubstr(std::string("ckpt_path = '") + link), HasSubstr("write the folder")));
  }
  trainer.fit(module, {.train = tiny_loader(), .val = tiny_loader()});
  EXPECT_THAT(refusal("best"), AllOf(HasSubstr("no checkpoint is marked as best"), HasSubstr("version_1")));
  trainer.test(module, {.test = tiny_loader()}, "last");
}

TEST_F(CheckpointPathTest, EvaluationFindsTheRunOfItsName) {
  steps_of({.max_epochs = 3, .name = "run", .callbacks = {ModelCheckpoint::make({.monitor = "seen"})}},
           make_module<CountsSteps>());
  Trainer trainer(options({.name = "run"}));
  for (const auto& [link, steps] : {std::pair("best", 5.0), std::pair("last", 15.0)}) {
    Metrics metrics;
    const std::string text =
        said([&] { metrics = trainer.test(make_module<CountsSteps>(), {.test = tiny_loader()}, link); });
    EXPECT_EQ(metrics.at("seen"), steps);
    EXPECT_THAT(text, HasSubstr("'" + fs::canonical(checkpoints("run") / link).string() + "'"));
  }
  Trainer other(options({.name = "other"}));
  EXPECT_THAT(message_of<UsageError>([&] { other.test(make_module<CountsSteps>(), {.test = tiny_loader()}, "last"); }),
              HasSubstr(checkpoints("other").string()));
}

TEST_F(CheckpointPathTest, EvaluationFindsTheFolderThatModelCheckpointWasGiven) {
  const ModelCheckpointOptions saved{.dirpath = dir.path() / "elsewhere", .monitor = "seen"};
  Trainer trainer(options({.max_epochs = 3, .callbacks = {ModelCheckpoint::make(saved)}}));
  trainer.fit(make_module<CountsSteps>(), {.train = tiny_loader(), .val = tiny_loader()});
  Trainer later(options({.callbacks = {ModelCheckpoint::make(saved)}}));
  for (Trainer* tested : {&trainer, &later}) {
    EXPECT_EQ(tested->test(make_module<CountsSteps>(), {.test = tiny_loader()}, "best").at("seen"), 5);
    EXPECT_EQ(tested->test(make_module<CountsSteps>(), {.test = tiny_loader()}, "last").at("seen"), 15);
  }
  EXPECT_FALSE(fs::exists(dir.path() / "runs"));
}

TEST_F(CheckpointPathTest, SaysWhichWeightsItTook) {
  steps_of({.max_epochs = 1, .name = "run"});
  const std::string path = checkpoints("run") / "epoch=0-step=5";
  EXPECT_THAT(said([&] { steps_of({.max_epochs = 1, .ckpt_path = path, .ckpt_weights_only = true}); }),
              HasSubstr("weights of '" + path + "'"));
}

TEST_F(CheckpointPathTest, WhatIsNoCheckpointIsRefusedWithWhatThereIs) {
  steps_of({.max_epochs = 1, .name = "run"});
  const auto refusal = [&](const std::string& path) {
    return message_of<UsageError>([&] { steps_of({.ckpt_path = path}); });
  };
  EXPECT_THAT(refusal((checkpoints("run") / "epoch=0-step=6").string()), HasSubstr("epoch=0-step=5"));
  EXPECT_THAT(refusal(dir.path().string()), HasSubstr("is no checkpoint: it has no manifest.json"));
  EXPECT_THAT(refusal((dir.path() / "runs" / "run").string()),
              HasSubstr("is the folder of a run; did you mean '" + (checkpoints("run") / "last").string() + "'?"));
  EXPECT_THAT(refusal((checkpoints("run") / "last" / "manifest.json").string()),
              HasSubstr("is a file of a checkpoint; did you mean its folder"));
  EXPECT_THAT(refusal("best"), HasSubstr("no checkpoint is marked as best"));
}

TEST_F(CheckpointPathTest, ACheckpointOfSomethingElseIsRefusedByName) {
  steps_of({.max_epochs = 1, .name = "run"});
  const std::string path = checkpoints("run") / "last";
  struct Larger : TinyModule {
    Larger() { register_module("extra", torch::nn::Linear(2, 2)); }
  };
  struct OtherShape : TinyModule {
    OtherShape() { out = replace_module("out", torch::nn::Linear(8, 2)); }
  };
  struct OtherType : TinyModule {
    OtherType() { register_buffer("table", at::zeros({2}, at::kLong)); }
  };
  struct WithTable : TinyModule {
    WithTable() { register_buffer("table", at::zeros({2})); }
  };
  struct WithSgd : TinyModule {
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.1}); }
  };
  const auto refusal = [&](const auto& module) {
    return message_of<CheckpointError>([&] { steps_of({.ckpt_path = path}, module); });
  };
  EXPECT_THAT(refusal(make_module<Larger>()),
              AllOf(HasSubstr("it lacks extra.weight, extra.bias"), HasSubstr("strict")));
  EXPECT_THAT(refusal(make_module<OtherShape>()), HasSubstr("'out.weight' has shape 1x8"));
  steps_of({.max_epochs = 1, .name = "table"}, make_module<WithTable>());
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { steps_of({.ckpt_path = checkpoints("table") / "last"}, make_module<OtherType>()); }),
              AllOf(HasSubstr("'table' has dtype Float"), HasSubstr("OtherType has dtype Long")));
  EXPECT_THAT(
      refusal(make_module<WithSgd>()),
      AllOf(HasSubstr("epoch=0-step=5: "), HasSubstr("the state of AdamW, but configure_optimizers returns SGD")));
  EXPECT_EQ(steps_of({.max_epochs = 1, .ckpt_path = path, .ckpt_strict = false, .ckpt_weights_only = true},
                     make_module<Larger>()),
            5);
  EXPECT_THAT(message_of<CheckpointError>([&] { steps_of({.max_epochs = 0, .ckpt_path = path}); }),
              HasSubstr("max_epochs"));
}

// Before version 0.1.0 a scheduler's state was text within text, which no reader of state.json checks.
TEST_F(CheckpointPathTest, AStateOfASchedulerThatCannotBeReadIsRefusedWithTheFolder) {
  struct WithSchedule : TinyModule {
    Optimizers configure_optimizers() override {
      return {optim::AdamW(parameters(), {.lr = 1e-2}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
  };
  steps_of({.max_epochs = 1, .name = "run"}, make_module<WithSchedule>());
  const fs::path file = checkpoints("run") / "last" / "state.json";
  std::string text = read_text_file(file, 1 << 20);
  const std::string name = "\"lr_schedules/0/scheduler\": \"StepLR\"";
  const size_t place = text.find(name);
  ASSERT_NE(place, text.npos);
  const size_t size_before = text.size();
  std::ofstream(file) << text.insert(place + name.size(), ",\n  \"lr_schedules/0/state\": \"{,\"");
  const fs::path manifest_file = checkpoints("run") / "last" / "manifest.json";
  std::string manifest = read_text_file(manifest_file, 1 << 20);
  const std::string size = std::to_string(size_before);
  const size_t its_place = manifest.find(size);
  ASSERT_NE(its_place, manifest.npos);
  std::ofstream(manifest_file) << manifest.replace(its_place, size.size(), std::to_string(text.size()));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                steps_of({.ckpt_path = checkpoints("run") / "last", .ckpt_verify = false}, make_module<WithSchedule>());
              }),
              AllOf(HasSubstr("epoch=0-step=5: the state of StepLR cannot be read"), HasSubstr("parse error")));
}

TEST_F(CheckpointPathTest, AScheduleThatTheRunDoesNotHaveIsRefused) {
  struct WithSchedule : TinyModule {
    Optimizers configure_optimizers() override {
      return {optim::AdamW(parameters(), {.lr = 1e-2}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
  };
  steps_of({.max_epochs = 1, .name = "run"}, make_module<WithSchedule>());
  EXPECT_THAT(message_of<CheckpointError>([&] { steps_of({.ckpt_path = "last", .name = "run"}); }),
              AllOf(HasSubstr("epoch=0-step=5: "), HasSubstr("1 learning-rate schedule"), HasSubstr("returns 0")));
}

// Keeps a number across a resume.
template <class Kind>
struct Keeps : Callback {
  explicit Keeps(int64_t number) : kept(number) {}
  State state() const override {
    State state;
    state.set("kept", kept);
    return state;
  }
  void load_state(const State& state) override { kept = state.get<int64_t>("kept"); }
  int64_t kept;
};
template <class Kind>
struct AlsoKeeps : Keeps<Kind> {
  using Keeps<Kind>::Keeps;
};

TEST_F(CheckpointPathTest, CallbacksOfTwoTemplatesKeepTheirOwn) {
  using A = Keeps<std::string>;
  using B = AlsoKeeps<std::string>;
  steps_of({.max_epochs = 1, .name = "run", .callbacks = {std::make_shared<A>(1), std::make_shared<B>(2)}});
  const auto a = std::make_shared<A>(0);
  const auto b = std::make_shared<B>(0);
  steps_of({.ckpt_path = "last", .name = "run", .callbacks = {b, a}});
  EXPECT_EQ(a->kept, 1);
  EXPECT_EQ(b->kept, 2);
}

TEST_F(CheckpointPathTest, TellsOfACallbackThatIsNotThereAnyMore) {
  steps_of({.max_epochs = 1, .name = "run", .callbacks = {std::make_shared<Keeps<int>>(1)}});
  EXPECT_THAT(said([&] { steps_of({.ckpt_path = "last", .name = "run"}); }),
              AllOf(HasSubstr("Keeps<int>"), HasSubstr("no callback")));
}

TEST_F(CheckpointPathTest, WeightsOnlyBeginARunAndCannotGoOn) {
  steps_of({.max_epochs = 1, .name = "run", .callbacks = {ModelCheckpoint::make({.save_weights_only = true})}});
  const std::string path = checkpoints("run") / "last";
  EXPECT_THAT(names_in(path), ElementsAre("manifest.json", "model.safetensors", "state.json"));
  EXPECT_THAT(message_of<UsageError>([&] { steps_of({.ckpt_path = path}); }), HasSubstr("has weights only"));
  EXPECT_EQ(steps_of({.max_epochs = 1, .ckpt_path = path, .ckpt_weights_only = true}), 5);
}

TEST_F(CheckpointPathTest, ADamagedFileIsFoundUnlessNobodyLooks) {
  steps_of({.max_epochs = 1, .name = "run"});
  const fs::path path = checkpoints("run") / "last";
  {
    std::fstream file(path / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  EXPECT_THAT(message_of<CheckpointError>([&] { steps_of({.ckpt_path = path.string()}); }),
              AllOf(HasSubstr("is damaged"), HasSubstr("model.safetensors")));
  EXPECT_EQ(steps_of({.ckpt_path = path.string(), .ckpt_verify = false}), 5);
}

TEST_F(CheckpointPathTest, ASignalEndsTheRunAfterTheStepAndItGoesOnFromThere) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string name = signal == SIGTERM ? "term" : "int";
    const auto raise_at_third = ends_at_third(signal);
    const auto module = make_module<TinyModule>();
    int exit_code = 0;
    try {
      steps_of({.name = name, .callbacks = {raise_at_third}}, module);
    } catch (const InterruptedError& error) {
      exit_code = error.exit_code;
      EXPECT_THAT(error.what(), HasSubstr("ended the run after 3 steps"));
    }
    EXPECT_EQ(exit_code, 128 + signal);
    EXPECT_EQ(module->train_losses.size(), 3U);
    EXPECT_EQ(steps_of({.ckpt_path = "last", .name = name}), 7);
  }
}

// SLURM announces the end of a job's time; the test puts its own `scontrol` first in PATH.
TEST_F(CheckpointPathTest, UnderSlurmItAsksToBeQueuedAgain) {
  const fs::path tool = dir.path() / "bin" / "scontrol";
  fs::create_directories(tool.parent_path());
  std::ofstream(tool) << "#!/bin/sh\necho \"$@\" > " << (dir.path() / "asked").string() << "\n";
  fs::permissions(tool, fs::perms::owner_all);
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", (tool.parent_path().string() + ":" + path).c_str(), 1);
  ::setenv("SLURM_JOB_ID", "4711", 1);
  const auto announce = at_batch_end([](TrainerControl& trainer) {
    if (trainer.state().global_step == 2) std::raise(SIGUSR1);
  });
  const std::string text = said([&] {  // the same command would start over
    EXPECT_THROW(steps_of({.name = "forgotten", .callbacks = {announce}}), InterruptedError);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("not queued again"), HasSubstr("--ckpt_path=last")));
  class AnnouncesLate final : public Callback {
   public:
    void on_train_end(TrainerControl&) override { std::raise(SIGUSR1); }
  };
  const std::string late = said([&] {
    EXPECT_THROW(steps_of({.name = "late", .callbacks = {std::make_shared<AnnouncesLate>()}}), InterruptedError);
  });
  EXPECT_THAT(late, HasSubstr("not queued again"));
  EXPECT_FALSE(fs::exists(dir.path() / "asked"));
  EXPECT_THROW(steps_of({.ckpt_path = "last", .name = "run", .callbacks = {announce}}), InterruptedError);
  ::unsetenv("SLURM_JOB_ID");
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(testing::read_file(dir.path() / "asked"), "requeue 4711\n");
  EXPECT_EQ(steps_of({.ckpt_path = "last", .name = "run"}), 8);
}

TEST_F(CheckpointPathTest, SavesWhatAnExceptionWouldLose) {
  for (const fs::path& folder : {checkpoints("run"), dir.path() / "elsewhere"}) {
    SCOPED_TRACE(folder);
    const bool is_usual = folder == checkpoints("run");
    const auto run = [&](const std::vector<std::shared_ptr<Callback>>& callbacks) {
      TrainerOptions given{.ckpt_path = "last", .name = is_usual ? "run" : "other", .callbacks = callbacks};
      given.callbacks.push_back(OnExceptionCheckpoint::make());
      given.callbacks.push_back(
          ModelCheckpoint::make({.dirpath = is_usual ? fs::path() : folder, .every_n_train_steps = 3}));
      return steps_of(given);
    };
    EXPECT_THROW(run({throws_at(4)}), std::runtime_error);
    EXPECT_THAT(names_in(folder), ElementsAre("epoch=0-step=3", "last", "on_exception"));
    EXPECT_THROW(run({throws_at(2)}), std::runtime_error);
    EXPECT_THAT(names_in(folder), ElementsAre("epoch=0-step=3", "last", "on_exception-v1"));
    EXPECT_EQ(run({}), 4);
    EXPECT_THAT(names_in(folder), ElementsAre("epoch=1-step=10", "last"));
  }
}

// The checkpoint that the run resumes from has what this one could not save.
TEST_F(CheckpointPathTest, AnExceptionBeforeTrainingLosesNothing) {
  struct FailsToStart : TinyModule {
    Optimizers configure_optimizers() override { throw std::runtime_error("the test wants it"); }
  };
  const auto run = [&](const std::vector<std::shared_ptr<Callback>>& callbacks, std::shared_ptr<TinyModule> module) {
    TrainerOptions given{.ckpt_path = "last", .name = "run", .callbacks = callbacks};
    given.callbacks.push_back(OnExceptionCheckpoint::make());
    return steps_of(given, std::move(module));
  };
  EXPECT_THROW(run({ends_at_third(SIGTERM)}, make_module<TinyModule>()), InterruptedError);
  const std::vector<std::string> saved = names_in(checkpoints("run"));
  EXPECT_THROW(run({}, make_module<FailsToStart>()), std::runtime_error);
  EXPECT_EQ(names_in(checkpoints("run")), saved);
  EXPECT_EQ(run({}, make_module<TinyModule>()), 7);
}

TEST_F(CheckpointPathTest, WrittenBesideTheTrainingItIsTheSame) {
  for (const bool async : {false, true}) {
    const std::string name = async ? "beside" : "at_once";
    seed_everything(1);
    steps_of({.name = name,
              .callbacks = {ModelCheckpoint::make({.save_top_k = -1, .every_n_train_steps = 2, .async = async})}});
  }
  EXPECT_EQ(names_in(checkpoints("beside")), names_in(checkpoints("at_once")));
  EXPECT_EQ(names_in(checkpoints("beside")).size(), 6U);
  for (const std::string& name : names_in(checkpoints("beside"))) {
    EXPECT_EQ(testing::read_file(checkpoints("beside") / name / "model.safetensors"),
              testing::read_file(checkpoints("at_once") / name / "model.safetensors"));
    verify(checkpoints("beside") / name, read_manifest(checkpoints("beside") / name));
  }
}

// Both save after the same step, before either checkpoint exists.
TEST_F(CheckpointPathTest, TwoThatSaveAtOnceUnderOneNameGetTwoNames) {
  steps_of({.name = "run",
            .callbacks = {ModelCheckpoint::make({.filename = "{epoch}", .every_n_train_steps = 5}),
                          ModelCheckpoint::make({.filename = "{epoch}",
                                                 .monitor = "train_loss",
                                                 .save_top_k = -1,
                                                 .every_n_train_steps = 5,
                                                 .async = true})}});
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("best", "epoch=0-v1", "epoch=1", "epoch=1-v1", "last"));
}

// The monitored value of a step differs between ranks.
TEST_F(CheckpointPathTest, RankZeroDecidesForAllRanks) {
  struct Ranked : TinyModule {
    explicit Ranked(int64_t rank) : rank_(rank) {}
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      log("mine", static_cast<double>(rank_ == 0 ? batch_idx : -batch_idx));
      return TinyModule::training_step(batch, batch_idx);
    }
    int64_t rank_;
  };
  std::vector<fs::path> best(2);
  testing::run_ranks(2, [&](World& world) {
    const auto checkpoint = ModelCheckpoint::make(
        {.filename = "{step}-{mine}", .monitor = "mine", .mode = "max", .every_n_train_steps = 1});
    Trainer trainer(options({.devices = 2, .max_epochs = 1, .name = "run", .callbacks = {checkpoint}}));
    trainer.fit(make_module<Ranked>(world.rank()), {.train = tiny_loader(40, 4)});
    best[static_cast<size_t>(world.rank())] = checkpoint->best_model_path();
  });
  EXPECT_EQ(best[0].filename(), "step=5-mine=4");
  EXPECT_EQ(best[1], best[0]);
  EXPECT_THAT(names_in(checkpoints("run")), ElementsAre("best", "last", "step=5-mine=4"));
}

TEST_F(CheckpointPathTest, WhatAKilledSaveLeftIsGoneAtTheNextStart) {
  for (const char* name : {"run", ""}) {
    steps_of({.max_epochs = 1, .name = name});
    const fs::path folder = checkpoints(*name == '\0' ? "version_0" : name);
    const fs::path left_over = folder / ".fulgur-tmp-0123456789abcdef";
    fs::create_directories(left_over);
    steps_of({.max_epochs = 1, .ckpt_path = "last", .name = name});
    EXPECT_FALSE(fs::exists(left_over));
    EXPECT_THAT(names_in(folder), ElementsAre("epoch=0-step=5", "last"));
  }
}

// The first save of a run may be killed when it has written everything but the name.
TEST_F(CheckpointPathTest, WhatAKilledSaveLeftIsNotTheLastCheckpoint) {
  const fs::path left_over = checkpoints("run") / ".fulgur-tmp-0123456789abcdef";
  fs::create_directories(left_over);
  std::ofstream(left_over / "manifest.json") << "{}";
  EXPECT_EQ(steps_of({.max_epochs = 1, .ckpt_path = "last", .name = "run"}), 5);
  EXPECT_FALSE(fs::exists(left_over));
}

// The folder may belong to a save in progress on another machine, whose locks are not visible here.
TEST_F(CheckpointPathTest, WhatASaveOfAnotherRunHasLeftStays) {
  const fs::path other = checkpoints("version_0") / ".fulgur-tmp-0123456789abcdef";
  fs::create_directories(other);
  steps_of({.max_epochs = 1});
  EXPECT_TRUE(fs::exists(other));
}

TEST_F(CheckpointPathTest, WhatAKilledSaveLeftIsGoneWhereverTheNextIsWritten) {
  const fs::path elsewhere = dir.path() / "elsewhere";
  fs::create_directories(elsewhere / ".fulgur-tmp-0123456789abcdef");
  steps_of({.max_epochs = 1, .callbacks = {ModelCheckpoint::make(), ModelCheckpoint::make({.dirpath = elsewhere})}});
  EXPECT_THAT(names_in(elsewhere), ElementsAre("epoch=0-step=5", "last"));
}

struct NetOptions {
  int64_t width = 8;
  double lr = 1e-3;
  std::string activation = "tanh";
  std::optional<int64_t> context = 4;
  void describe(FieldVisitor& visit) {
    visit({.name = "width", .min = 1}, &width);
    visit({.name = "lr"}, &lr);
    visit({.name = "activation"}, &activation);
    visit({.name = "context"}, &context);
  }
};

TEST_F(CheckpointPathTest, SaysWhatTheModuleWasMadeWith) {
  struct Net : TinyModule {
    explicit Net(const NetOptions& options) { save_hyper_parameters(options); }
  };
  steps_of({.max_epochs = 1, .name = "run"},
           make_module<Net>(NetOptions{.width = 16, .lr = 0.1, .activation = "relu", .context = std::nullopt}));
  const fs::path path = checkpoints("run") / "last";
  const auto options = load_hyper_parameters<NetOptions>(path);
  EXPECT_EQ(options.width, 16);
  EXPECT_EQ(options.lr, 0.1);
  EXPECT_EQ(options.activation, "relu");
  EXPECT_EQ(options.context, std::nullopt);
  steps_of({.max_epochs = 1, .name = "other"}, make_module<Net>(NetOptions{.context = 6}));
  EXPECT_EQ(saved_hyper_parameters(checkpoints("other") / "last").get<int64_t>("context"), 6);
  struct Other {
    int64_t widths = 8;
    void describe(FieldVisitor& visit) { visit({.name = "widths"}, &widths); }
  };
  EXPECT_THAT(message_of<UsageError>([&] { load_hyper_parameters<Other>(path); }), HasSubstr("unknown setting"));
}

TEST_F(CheckpointPathTest, WhatCannotBeWrittenBesideTheTrainingEndsIt) {
  const fs::path folder = checkpoints("run");
  const auto blocks = at_batch_end([&](TrainerControl&) {
    fs::create_directories(folder / "last");  // takes the name of the link
  });
  EXPECT_THAT(message_of<CheckpointError>([&] {
                steps_of({.name = "run",
                          .callbacks = {blocks, ModelCheckpoint::make({.every_n_train_steps = 2, .async = true})}});
              }),
              HasSubstr((folder / "last").string()));
}

TEST_F(CheckpointPathTest, AScheduleThatTheCheckpointDoesNotHaveIsRefused) {
  steps_of({.max_epochs = 1, .name = "run"});
  struct WithSchedule : TinyModule {
    Optimizers configure_optimizers() override {
      return {optim::AdamW(parameters(), {.lr = 1e-2}), {.scheduler = optim::StepLR::make({.step_size = 1})}};
    }
  };
  EXPECT_THAT(
      message_of<CheckpointError>([&] { steps_of({.ckpt_path = "last", .name = "run"}, make_module<WithSchedule>()); }),
      AllOf(HasSubstr("0 learning-rate schedules"), HasSubstr("returns 1")));
}

// A data module that learns how many samples it has for training.
struct LearnsItsSize : DataModule {
  explicit LearnsItsSize(int64_t given) : size(given), learnt(given) {}
  int64_t size, learnt;
  std::shared_ptr<Loader> train_dataloader() override { return tiny_loader(size); }
  LoaderList val_dataloader() override { return tiny_loader(size); }
  LoaderList test_dataloader() override { return tiny_loader(size); }
  LoaderList predict_dataloader() override { return tiny_loader(size); }
  State state() const override {
    State state;
    state.set("size", learnt);
    return state;
  }
  void load_state(const State& state) override { learnt = state.get<int64_t>("size"); }
};

TEST_F(CheckpointPathTest, EveryCommandGivesTheDataModuleWhatItHasLearntInTraining) {
  const auto module = make_module<TinyModule>();
  LearnsItsSize data(40);
  Trainer(options({.max_epochs = 1, .name = "run"})).fit(module, data);
  Trainer trainer(options({.name = "run"}));
  for (const auto& run : std::vector<std::function<void(LearnsItsSize&)>>{
           [&](LearnsItsSize& other) { trainer.validate(module, other, "last"); },
           [&](LearnsItsSize& other) { trainer.test(module, other, "last"); },
           [&](LearnsItsSize& other) { trainer.predict(module, other, "last"); }}) {
    LearnsItsSize other(16);
    run(other);
    EXPECT_EQ(other.learnt, 40);
  }
  trainer.test(module, {.test = tiny_loader()}, "last");  // other data need nothing of it
  LearnsItsSize other(16);
  trainer.test(module, other);
  EXPECT_EQ(other.learnt, 16);
}

TEST_F(CheckpointPathTest, AFolderOfRunsThatIsALinkStays) {
  const fs::path runs = dir.path() / "runs", elsewhere = dir.path() / "elsewhere";
  fs::create_directories(elsewhere / "run");
  fs::create_directory(runs);
  fs::create_directory_symlink(elsewhere / "run", runs / "run");
  TrainerOptions with_files{.max_epochs = 1, .name = "run"};
  steps_of(with_files);
  EXPECT_TRUE(fs::is_symlink(runs / "run"));
  EXPECT_TRUE(fs::exists(elsewhere / "run" / "checkpoints" / "last"));
  fs::remove(runs / "run");
  fs::remove(runs);
  fs::create_directory_symlink(elsewhere, runs);
  Trainer(options({.name = "unused", .enable_checkpointing = false}))
      .fit(make_module<TinyModule>(), {.train = tiny_loader()});
  EXPECT_TRUE(fs::is_symlink(runs));
}

}  // namespace
}  // namespace fulgur
