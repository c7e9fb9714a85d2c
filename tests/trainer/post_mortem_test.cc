// What a run leaves in its folder when an exception ends it.
#include "fulgur/trainer/post_mortem.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nested.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <latch>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::quiet;
using testing::read_file;
using testing::run_ranks;
using testing::tiny_dataset;
using testing::tiny_loader;
using testing::TinyModule;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// Calls a function in each of its steps, which may throw.
struct FailingModule : TinyModule {
  explicit FailingModule(std::function<void(FailingModule&, const Batch&, int64_t)> given)
      : in_step(std::move(given)) {}
  std::function<void(FailingModule&, const Batch&, int64_t)> in_step;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    in_step(*this, batch, batch_idx);
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch& batch, int64_t batch_idx) override { in_step(*this, batch, batch_idx); }
  void test_step(const Batch& batch, int64_t batch_idx) override { in_step(*this, batch, batch_idx); }
  Batch predict_step(const Batch& batch, int64_t batch_idx) override {
    in_step(*this, batch, batch_idx);
    return batch;
  }
};

void fail(FailingModule&, const Batch&, int64_t) { throw std::runtime_error("boom"); }

// Gives one batch.
class OneBatch final : public Loader {
 public:
  explicit OneBatch(Batch batch) : batch_(std::move(batch)) {}
  void begin_epoch(int64_t) override { is_given_ = false; }
  std::optional<Batch> next() override { return std::exchange(is_given_, true) ? std::nullopt : std::optional(batch_); }
  std::optional<int64_t> num_batches() const override { return 1; }

 private:
  const Batch batch_;
  bool is_given_ = false;
};

class PostMortemTest : public ::testing::Test {
 protected:
  fs::path run() const { return root() / "runs/a"; }
  const fs::path& root() const { return folder_.path(); }

  TrainerOptions options(TrainerOptions given = {}) const {
    given.default_root_dir = root().string();
    given.name = "a";
    given.enable_post_mortem = true;
    given.log_every_n_steps = 1;
    return quiet(std::move(given));
  }

  // Lets fit fail; returns what it printed to stderr.
  template <class Error = std::runtime_error>
  std::string fit(const std::function<void(FailingModule&, const Batch&, int64_t)>& in_step, TrainerOptions given = {},
                  std::shared_ptr<Loader> loader = tiny_loader()) {
    ::testing::internal::CaptureStderr();
    Trainer trainer(options(std::move(given)));
    message_ = message_of<Error>([&] { trainer.fit(make_module<FailingModule>(in_step), {.train = loader}); });
    return ::testing::internal::GetCapturedStderr();
  }

  json found(const std::string& folder = "post_mortem", int64_t rank = 0) const {
    return json::parse(read_file(run() / folder / ("rank-" + std::to_string(rank) + ".json")));
  }

  std::string message_;  // what the exception that left fit says

 private:
  testing::TempDir folder_;
};

TEST_F(PostMortemTest, HasWhatWasKnownOfTheRun) {
  const auto in_step = [](FailingModule& module, const Batch&, int64_t batch_idx) {
    if (batch_idx == 3) throw std::runtime_error("boom");
    module.log("seen", static_cast<double>(batch_idx));
  };
  const std::string printed = fit(in_step, {.max_epochs = 7});
  EXPECT_THAT(printed, HasSubstr("what was known of it is in " + (run() / "post_mortem").string() + "\n"));
  const json file = found();
  EXPECT_EQ(file["error"], "in training_step (train, epoch 0, batch 3 with x [8, 4] float, y [8, 1] float): boom");
  EXPECT_EQ(file["rank"], 0);
  EXPECT_EQ(file["entry_point"], "fit");
  EXPECT_EQ(file["stage"], "train");
  EXPECT_EQ(file["global_step"], 3);
  EXPECT_EQ(file["batch_idx"], 3);
  EXPECT_EQ(file["metrics"]["seen"], 2);
  EXPECT_EQ(file["trainer_options"]["max_epochs"], "7");
  EXPECT_EQ(file["trainer_options"]["name"], "a");
  EXPECT_EQ(file["environment"]["world_size"], 1);
  EXPECT_EQ(file["environment"]["process"], ::getpid());
  EXPECT_THAT(file["environment"]["arguments"][0].get<std::string>(), HasSubstr("post_mortem_test"));
  EXPECT_TRUE(file["config"].is_null());
  EXPECT_TRUE(file["ranks"].empty());
}

// Keeps where the run was when its exception was thrown.
struct WatchesFailure final : Callback {
  std::optional<RunState> state;
  void on_exception(TrainerControl& trainer, const std::exception&) override { state = trainer.state(); }
};

TEST_F(PostMortemTest, SaysInWhichStageAValidationFailed) {
  struct FailsInValidation : TinyModule {
    bool in_sanity_check = false, at_the_end = false;
    bool is_here() { return run_state().sanity_checking == in_sanity_check; }
    void validation_step(const Batch&, int64_t batch_idx) override {
      if (is_here() && !at_the_end && batch_idx == 1) throw std::runtime_error("boom");
    }
    void on_validation_epoch_end() override {
      if (is_here() && at_the_end) throw std::runtime_error("boom");
    }
  };
  std::string folder = "post_mortem";
  int version = 0;
  for (const bool in_sanity_check : {true, false}) {
    for (const bool at_the_end : {false, true}) {
      SCOPED_TRACE(folder);
      const auto watches = std::make_shared<WatchesFailure>();
      Trainer trainer(options({.callbacks = {watches}}));
      const auto module = make_module<FailsInValidation>();
      module->in_sanity_check = in_sanity_check;
      module->at_the_end = at_the_end;
      EXPECT_THROW(trainer.fit(module, {.train = tiny_loader(), .val = tiny_loader()}), std::runtime_error);
      EXPECT_EQ(found(folder)["stage"], "validate");
      EXPECT_EQ(found(folder)["is_sanity_check"], in_sanity_check);
      EXPECT_EQ(found(folder)["batch_idx"], at_the_end ? (in_sanity_check ? 2 : 5) : 1);
      EXPECT_EQ(found(folder)["global_step"], in_sanity_check ? 0 : 5);
      EXPECT_EQ(watches->state->stage, Stage::validate);
      EXPECT_EQ(watches->state->sanity_checking, in_sanity_check);
      EXPECT_FALSE(trainer.state().sanity_checking);
      folder = "post_mortem-v" + std::to_string(++version);
    }
  }
}

TEST_F(PostMortemTest, HasTheSpansThatEndedLast) {
  fit(
      [](FailingModule&, const Batch&, int64_t batch_idx) {
        if (batch_idx == 39) throw std::runtime_error("boom");
      },
      {}, tiny_loader(40, 1));
  const json spans = found()["spans"];
  EXPECT_EQ(spans.size(), 100u);
  EXPECT_EQ(spans.back()["name"], "training_step");
  std::vector<std::string> names;
  for (const auto& span : spans) names.push_back(span["name"]);
  EXPECT_THAT(names, AllOf(::testing::Contains("wait for data"), ::testing::Contains("forward"),
                           ::testing::Contains("backward"), ::testing::Contains("optimizer step")));
}

TEST_F(PostMortemTest, TheBatchIsDescribedWithoutItsData) {
  const at::Tensor x = at::arange(6, at::kFloat).reshape({3, 2}).clone();
  x[0][1] = kNan;
  x[1][0] = -kInf;
  x[2][1] = 54321.5;
  fit(fail, {}, std::make_shared<OneBatch>(Batch{{"x", x}, {"y", at::ones({3, 1})}}));
  const json batch = found()["batch"];
  ASSERT_EQ(batch.size(), 2u);
  EXPECT_EQ(batch[0], (json{{"name", "x"},
                            {"shape", {3, 2}},
                            {"dtype", "Float"},
                            {"device", "cpu"},
                            {"num_non_finite", 2},
                            {"lowest", 0.0},
                            {"highest", 54321.5}}));
  EXPECT_EQ(batch[1]["name"], "y");
}

TEST_F(PostMortemTest, TensorsOfEachKindAreDescribed) {
  const auto half = at::tensor({1.0F, -2.0F, kNan}).to(at::kHalf);
  const auto sparse = at::tensor({0.0F, 7.0F, 0.0F}).to_sparse();
  const auto complex = at::complex(at::tensor({1.0F, 2.0F}), at::tensor({-5.0F, kInf}));
  const auto nested = torch::nested::nested_tensor({at::full({2}, 3.0F), at::full({4}, -4.0F)});
  write_post_mortem({.batch = Batch{{"half", half},
                                    {"sparse", sparse},
                                    {"complex", complex},
                                    {"nested", nested},
                                    {"bool", at::tensor({1, 1}).to(at::kBool)},
                                    {"int", at::tensor({int64_t{-9007199254740993}, int64_t{4}})},
                                    {"empty", at::empty({0, 3})},
                                    {"nan", at::full({2}, kNan)},
                                    {"scalar", at::scalar_tensor(2.5)}}},
                    root(), root() / "written");
  const json batch = json::parse(read_file(root() / "written/rank-0.json"))["batch"];
  const auto check = [&](size_t i, const json& shape, const json& lowest, const json& highest, int64_t num_non_finite) {
    EXPECT_EQ(batch[i]["shape"], shape) << batch[i];
    EXPECT_EQ(batch[i].value("lowest", json()), lowest) << batch[i];
    EXPECT_EQ(batch[i].value("highest", json()), highest) << batch[i];
    EXPECT_EQ(batch[i]["num_non_finite"], num_non_finite) << batch[i];
  };
  check(0, {3}, -2, 1, 1);
  check(1, {3}, 7, 7, 0);  // zeros are not stored
  check(2, {2}, -5, 2, 1);
  check(3, {{2}, {4}}, -4, 3, 0);
  check(4, {2}, 1, 1, 0);
  check(5, {2}, int64_t{-9007199254740993}, 4, 0);
  check(6, {0, 3}, nullptr, nullptr, 0);
  check(7, {2}, nullptr, nullptr, 2);
  check(8, json::array(), 2.5, 2.5, 0);
  EXPECT_EQ(batch[0]["dtype"], "Half");
}

TEST_F(PostMortemTest, ANestedTensorInTheBatchHidesNoError) {
  const auto nested = torch::nested::nested_tensor({at::ones({2}), at::ones({4})});
  fit(fail, {}, std::make_shared<OneBatch>(Batch{{"words", nested}, {"y", at::ones({2, 1})}}));
  EXPECT_EQ(message_, "boom");
  EXPECT_THAT(found()["error"].get<std::string>(), HasSubstr("words nested float, y [2, 1] float): boom"));
  EXPECT_EQ(found()["batch"][0]["shape"], (json{{2}, {4}}));
}

TEST_F(PostMortemTest, NamesOfMetricsMayHaveAnyCharacter) {
  const std::string odd = "a\"b\\</script>\n,\x01";
  fit([&](FailingModule& module, const Batch&, int64_t batch_idx) {
    if (batch_idx == 1) throw std::runtime_error("boom \xff");
    module.log(odd, 0.25);
    module.log("none", std::numeric_limits<double>::quiet_NaN());
  });
  EXPECT_EQ(found()["metrics"][odd], 0.25);
  EXPECT_EQ(found()["metrics"]["none"], "nan");
  EXPECT_THAT(found()["error"].get<std::string>(), HasSubstr("boom \xef\xbf\xbd"));
}

TEST_F(PostMortemTest, EachEntryPointLeavesOneAndNoneIsOverwritten) {
  Trainer trainer(options());
  const auto module = make_module<FailingModule>(fail);
  const auto loader = tiny_loader();
  EXPECT_THROW(trainer.validate(module, {.val = loader}), std::runtime_error);
  EXPECT_THROW(trainer.test(module, {.test = loader}), std::runtime_error);
  EXPECT_THROW(trainer.predict(module, {.predict = loader}), std::runtime_error);
  EXPECT_EQ(found("post_mortem")["entry_point"], "validate");
  EXPECT_EQ(found("post_mortem-v1")["entry_point"], "test");
  EXPECT_EQ(found("post_mortem-v2")["entry_point"], "predict");
}

TEST_F(PostMortemTest, HasTheConfigOfTheRunFolder) {
  fs::create_directories(run());
  std::ofstream(run() / "config.toml") << "seed = 1\n";
  std::ofstream(run() / "config-v1.toml") << "seed = \"2\"\n";
  fit(fail);
  EXPECT_EQ(found()["config"], "seed = \"2\"\n");
}

TEST_F(PostMortemTest, WhatItsMessageExplainsLeavesNone) {
  fit<UsageError>([](FailingModule&, const Batch&, int64_t) { throw UsageError("write something else"); });
  fit<SetupError>([](FailingModule&, const Batch&, int64_t) { throw SetupError("add something"); });
  fit<InterruptedError>([](FailingModule&, const Batch&, int64_t) { std::raise(SIGTERM); });
  EXPECT_FALSE(fs::exists(run()));
}

TEST_F(PostMortemTest, BeforeTheFirstBatchThereIsNone) {
  struct NoData final : Loader {
    void begin_epoch(int64_t) override { throw std::runtime_error("there is no file 'data'"); }
    std::optional<Batch> next() override { return std::nullopt; }
    std::optional<int64_t> num_batches() const override { return 1; }
  };
  const std::string printed = fit(fail, {}, std::make_shared<NoData>());
  EXPECT_THAT(printed, Not(HasSubstr("what was known")));
  EXPECT_FALSE(fs::exists(run()));
}

TEST_F(PostMortemTest, BeforeTheFirstBatchOfARunThatResumesThereIsNoneEither) {
  struct NoFile final : DataModule {
    std::shared_ptr<Loader> train_dataloader() override { throw std::runtime_error("there is no file 'data'"); }
  };
  const auto saves = testing::at_batch_end(
      [&](TrainerControl& control) { control.save_checkpoint(root() / std::to_string(control.state().global_step)); });
  Trainer(options({.callbacks = {saves}})).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  NoFile data;
  Trainer trainer(options({.max_epochs = 2, .ckpt_path = root() / "3"}));
  EXPECT_THROW(trainer.fit(make_module<TinyModule>(), data), std::runtime_error);
  EXPECT_EQ(trainer.state().global_step, 3);
  EXPECT_FALSE(fs::exists(run() / "post_mortem"));
}

TEST_F(PostMortemTest, IsLeftOutWhereNothingIsWritten) {
  fit(fail, {.fast_dev_run = 1});
  const auto fails = [&](const TrainerOptions& given) {
    Trainer trainer(given);
    EXPECT_THROW(trainer.fit(make_module<FailingModule>(fail), {.train = tiny_loader()}), std::runtime_error);
  };
  TrainerOptions off = options();
  off.enable_post_mortem = false;
  fails(off);
  fails({.accelerator = "cpu", .max_epochs = 1, .default_root_dir = root().string(), .barebones = true});
  EXPECT_FALSE(fs::exists(root() / "runs"));
  EXPECT_THAT(message_of<UsageError>([] { Trainer({.enable_post_mortem = true, .barebones = true}); }),
              HasSubstr("enable_post_mortem is set"));
}

TEST_F(PostMortemTest, AFolderThatCannotBeWrittenHidesNoError) {
  std::ofstream(root() / "runs") << "a file";
  const std::string printed = fit(fail);
  EXPECT_EQ(message_, "boom");
  EXPECT_THAT(printed, AllOf(HasSubstr("no post-mortem is written: "), HasSubstr((root() / "runs").string()),
                             Not(HasSubstr("what was known"))));
}

// Runs fit on two ranks, which fails; returns what was printed.
std::string fit_on_ranks(const TrainerOptions& given, double timeout_s,
                         const std::function<void(int64_t rank, int64_t batch_idx)>& in_step,
                         const std::shared_ptr<Callback>& callback = std::make_shared<Callback>()) {
  ::testing::internal::CaptureStderr();
  std::latch both_are_there(2);  // the timeout need not cover the start of a thread
  EXPECT_ANY_THROW(run_ranks(2, {.timeout_s = timeout_s, .heartbeat_interval_s = 0.1}, [&](World& world) {
    TrainerOptions options = given;
    options.strategy = "ddp";
    options.devices = 2;
    options.callbacks = {callback};
    const auto step = [&](FailingModule&, const Batch&, int64_t batch_idx) { in_step(world.rank(), batch_idx); };
    Trainer trainer(options);
    both_are_there.arrive_and_wait();
    trainer.fit(make_module<FailingModule>(step), {.train = tiny_loader(64, 4)});
  }));
  return ::testing::internal::GetCapturedStderr();
}

TEST_F(PostMortemTest, EachRankWritesItsOwnFile) {
  const std::string printed = fit_on_ranks(options(), testing::kRanksTimeoutS, [](int64_t rank, int64_t batch_idx) {
    if (rank == 1 && batch_idx == 2) throw std::runtime_error("boom");
  });
  EXPECT_THAT(found("post_mortem", 1)["error"].get<std::string>(), AllOf(HasSubstr("rank 1"), HasSubstr("): boom")));
  EXPECT_THAT(found("post_mortem", 0)["error"].get<std::string>(), HasSubstr("rank 1 failed at step 2"));
  EXPECT_THAT(found("post_mortem", 0)["ranks"][1].get<std::string>(), HasSubstr("rank 1 was seen at step "));
  EXPECT_THAT(found("post_mortem", 1)["ranks"][0].get<std::string>(), HasSubstr("rank 1 is at step 2, in collective "));
  const auto told = printed.find("what was known");
  ASSERT_NE(told, std::string::npos);
  EXPECT_EQ(printed.find("what was known", told + 1), std::string::npos) << printed;
}

TEST_F(PostMortemTest, AHangSaysWhichRankWaitsInWhichCollective) {
  std::promise<void> failed;
  struct Tells final : Callback {
    std::promise<void>* failed = nullptr;
    bool runs_on_every_rank() const override { return false; }
    void on_exception(TrainerControl&, const std::exception&) override { failed->set_value(); }
  };
  const auto tells = std::make_shared<Tells>();
  tells->failed = &failed;
  const auto wait = failed.get_future().share();
  fit_on_ranks(
      options(), /*timeout_s=*/1,
      [&](int64_t rank, int64_t batch_idx) {
        if (rank == 1 && batch_idx == 2) wait.wait();  // until rank 0 has given up
      },
      tells);
  const json file = found("post_mortem", 0);
  EXPECT_THAT(file["error"].get<std::string>(),
              AllOf(ContainsRegex("\\(collective [0-9]+ of group '\\w+', timeout 1 s\\) failed"),
                    HasSubstr("rank 1 is missing")));
  EXPECT_THAT(file["ranks"][0].get<std::string>(),
              ContainsRegex("^rank 0 is at step 2, in collective [0-9]+ of group 'data'"));
  EXPECT_THAT(file["ranks"][1].get<std::string>(),
              ContainsRegex("^rank 1 was seen at step 2, in collective [0-9]+ of group 'data'"));
  EXPECT_EQ(file["batch"][0]["shape"], (json{4, 4}));
}

}  // namespace
}  // namespace fulgur
