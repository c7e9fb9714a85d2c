// TrainerControl::roll_back and scale_lr: as if the batches since the checkpoint had been left out.
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/weight_averaging.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"
#include "tests/testing/without_warmup.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using testing::at_batch_end;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;

// Batches 0 to 3 are trained on and saved, 4 to 6 are undone, 7 to 9 are trained on.
constexpr int64_t kSaved = 3, kUndoneUpTo = 6, kBatches = 10, kBatchSize = 6;
constexpr double kLr = 1e-2, kFactor = 0.5;

struct Counting : testing::TinyModule {
  at::Tensor num_steps = register_buffer("num_steps", at::zeros({1}));
  int64_t own = 0;  // kept by on_save_checkpoint
  std::vector<double> lrs;
  bool leaves_out = false;

  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    lrs.push_back(optimizers()[0].groups()[0].lr);
    if (leaves_out && batch_idx > kSaved && batch_idx <= kUndoneUpTo) return {};
    num_steps.add_(1);
    ++own;
    return TinyModule::training_step(batch, batch_idx);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = kLr}); }
  void on_save_checkpoint(State& state) override { state.set("own", own); }
  void on_load_checkpoint(const State& state) override { own = state.get<int64_t>("own"); }
};

struct Given {
  std::string strategy, precision = "32";
  int64_t world_size = 1;
  bool leaves_out = false;  // instead of going back
  bool averages = false, async = false;
  std::string ckpt_path{};
  int64_t saved_after = kSaved;  // batch; -1: there is no checkpoint
};

std::shared_ptr<Counting> seeded_module() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  seed_everything(5);
  return make_module<Counting>();
}

std::map<std::string, at::Tensor> safetensors_of(const fs::path& folder) {
  const CheckpointReader checkpoint(folder);
  const NamedTensors weights = checkpoint.weights();
  return {weights.begin(), weights.end()};
}

struct Outcome {
  std::shared_ptr<Counting> module;
  bool went_back = false;
  int64_t global_step = 0;
};

// What rank 0 has.
Outcome fit(const Given& run) {
  const testing::TempDir dir;
  Outcome outcome;
  const auto fit_rank = [&](int64_t rank) {
    const auto module = seeded_module();
    module->leaves_out = run.leaves_out;
    bool went_back = false;
    TrainerOptions options{.strategy = testing::without_warmup(run.strategy), .precision = run.precision};
    options.ckpt_path = run.ckpt_path;
    if (run.strategy == "dp") options.devices = 2;
    if (run.world_size > 1) options.devices = run.world_size;
    if (run.averages) options.callbacks.push_back(WeightAveraging::make({.decay = 0.6}));
    options.callbacks.push_back(at_batch_end([&](TrainerControl& trainer) {
      const int64_t batch_idx = trainer.state().batch_idx;
      if (batch_idx == run.saved_after) trainer.save_checkpoint(dir.path() / "saved", {.async = run.async});
      if (batch_idx != kUndoneUpTo) return;
      trainer.scale_lr(0, 0, kFactor);
      if (!run.leaves_out) went_back = trainer.roll_back();
    }));
    Trainer trainer(quiet(options));
    trainer.fit(module, {.train = tiny_loader(kBatches * kBatchSize * run.world_size, kBatchSize)});
    if (rank == 0) outcome = {module, went_back, trainer.state().global_step};
  };
  if (run.world_size == 1) {
    fit_rank(0);
  } else {
    testing::run_ranks(run.world_size, [&](World& world) { fit_rank(world.rank()); });
  }
  return outcome;
}

// A parameter after one more update by the same gradient: AdamW's formula, with the defaults of torch.
at::Tensor updated_again(torch::optim::AdamW& adamw, const at::Tensor& param) {
  const auto& options = static_cast<torch::optim::AdamWOptions&>(adamw.param_groups()[0].options());
  auto& state = static_cast<torch::optim::AdamWParamState&>(*adamw.state()[param.unsafeGetTensorImpl()]);
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(state.step() + 1);
  const at::Tensor m = state.exp_avg() * beta1 + param.grad() * (1 - beta1);
  const at::Tensor v = state.exp_avg_sq() * beta2 + param.grad().square() * (1 - beta2);
  const at::Tensor root = (v / (1 - std::pow(beta2, t))).sqrt() + options.eps();
  return param - options.lr() * (m / (1 - std::pow(beta1, t)) / root + options.weight_decay() * param);
}

// Torch's AdamW on the batches that count; `late`: each update is applied after the next backward, as by
// delayed_update, and forward expects the last update again, but the update that was in progress when the checkpoint
// was saved is applied at once.
std::shared_ptr<Counting> plain_loop(int64_t world_size, bool late) {
  const auto module = seeded_module(), read_by_forward = seeded_module();
  torch::optim::AdamW adamw(module->parameters(), torch::optim::AdamWOptions(kLr).weight_decay(1e-2));
  std::optional<std::vector<at::Tensor>> pending;
  const auto apply = [&](bool is_followed) {
    if (!pending) return;
    for (size_t i = 0; i < pending->size(); ++i) module->parameters()[i].mutable_grad() = (*pending)[i];
    adamw.step();
    pending.reset();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < module->parameters().size(); ++i) {
      const at::Tensor param = module->parameters()[i];
      read_by_forward->parameters()[i].copy_(is_followed ? updated_again(adamw, param) : param);
    }
  };
  const auto loader = tiny_loader(kBatches * kBatchSize * world_size, kBatchSize * world_size);
  loader->begin_epoch(0);
  for (int64_t i = 0; i < kBatches; ++i) {
    const auto batch = loader->next();
    if (i > kSaved && i <= kUndoneUpTo) continue;
    if (i == kUndoneUpTo + 1) {
      apply(/*is_followed=*/false);
      static_cast<torch::optim::AdamWOptions&>(adamw.param_groups()[0].options()).lr(kLr * kFactor);
    }
    read_by_forward->zero_grad();
    read_by_forward->loss(*batch).backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& param : read_by_forward->parameters()) gradients.push_back(param.grad().clone());
    apply(/*is_followed=*/true);
    pending = gradients;
    if (!late) apply(/*is_followed=*/false);
  }
  apply(/*is_followed=*/false);
  return module;
}

TEST(RollBack, UndoesTheUpdatesSinceTheCheckpointUnderEveryStrategy) {
  for (const char* strategy : {"single_device", "dp", "ddp", "ddp_sharded", "zero_offload", "delayed_update"}) {
    for (const int64_t world_size : {1, 2, 3}) {
      if (world_size > 1 && (strategy == std::string_view("single_device") || strategy == std::string_view("dp"))) {
        continue;
      }
      SCOPED_TRACE(c10::str(strategy, ", ", world_size, " ranks"));
      const Outcome outcome = fit({.strategy = strategy, .world_size = world_size});
      EXPECT_TRUE(outcome.went_back);
      EXPECT_EQ(outcome.global_step, kBatches);  // counters go on
      const auto expected = plain_loop(world_size, /*late=*/strategy == std::string_view("delayed_update"));
      for (const auto& item : expected->named_parameters()) {
        const at::Tensor param = outcome.module->named_parameters()[item.key()];
        EXPECT_TRUE(param.allclose(item.value(), 1e-5, 1e-6)) << item.key();
      }
      if (strategy == std::string_view("dp")) continue;  // whose replicas count
      EXPECT_EQ(outcome.module->num_steps.item<float>(), kBatches - (kUndoneUpTo - kSaved));
      EXPECT_EQ(outcome.module->own, kBatches - (kUndoneUpTo - kSaved));
    }
  }
}

// Masters of 16-bit weights and averages come from the checkpoint.
TEST(RollBack, GivesTheBitsOfARunThatLeavesTheBatchesOut) {
  for (const char* strategy : {"single_device", "ddp", "ddp_sharded", "zero_offload"}) {
    for (const int64_t world_size : {1, 2}) {
      if (world_size > 1 && strategy == std::string_view("single_device")) continue;
      for (const char* precision : {"32", "bf16-true"}) {
        for (const bool averages : {false, true}) {
          SCOPED_TRACE(c10::str(strategy, ", ", world_size, " ranks, ", precision, averages ? ", average" : ""));
          Given run{.strategy = strategy, .precision = precision, .world_size = world_size, .averages = averages};
          const Outcome back = fit(run);
          run.leaves_out = true;
          const Outcome without = fit(run);
          for (const auto& item : without.module->named_parameters()) {
            EXPECT_TRUE(back.module->named_parameters()[item.key()].equal(item.value())) << item.key();
          }
        }
      }
    }
  }
}

TEST(RollBack, TakesCheckpointsThatAreWrittenInTheBackground) {
  const Outcome async = fit({.strategy = "ddp", .world_size = 2, .async = true}),
                sync = fit({.strategy = "ddp", .world_size = 2});
  EXPECT_TRUE(async.went_back);
  for (const auto& item : sync.module->named_parameters()) {
    EXPECT_TRUE(async.module->named_parameters()[item.key()].equal(item.value())) << item.key();
  }
}

// Rank 0 leaves the epoch within the step that goes back.
TEST(RollBack, RanksGoBackTogetherWhereOneSkipsTheEpoch) {
  struct Skips final : Callback {
    explicit Skips(fs::path given) : folder(std::move(given)) {}
    fs::path folder;
    BatchAction on_train_batch_start(TrainerControl& trainer, const Batch&, int64_t batch_idx) override {
      const bool skips = trainer.global_rank() == 0 && trainer.state().epoch == 0 && batch_idx == 3;
      return skips ? BatchAction::skip_epoch : BatchAction::run;
    }
    bool judges_updates() const override { return true; }
    bool accepts_update(TrainerControl& trainer, double, double) override {
      if (trainer.state().epoch > 0 || trainer.state().global_step < 3) return true;
      EXPECT_TRUE(trainer.roll_back());
      return false;
    }
    void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t batch_idx) override {
      if (trainer.state().epoch == 0 && batch_idx == 0) trainer.save_checkpoint(folder / "saved");
    }
  };
  for (const char* strategy : {"ddp", "ddp_sharded", "delayed_update"}) {
    SCOPED_TRACE(strategy);
    const testing::TempDir dir;
    std::vector<std::shared_ptr<Counting>> modules(2);
    testing::run_ranks(2, [&](World& world) {
      const auto module = modules[static_cast<size_t>(world.rank())] = seeded_module();
      TrainerOptions options{.strategy = testing::without_warmup(strategy), .devices = 2, .max_epochs = 2};
      options.callbacks = {std::make_shared<Skips>(dir.path())};
      Trainer(quiet(options)).fit(module, {.train = tiny_loader(2 * 6 * kBatchSize, kBatchSize)});
    });
    for (const auto& item : modules[0]->named_parameters()) {
      EXPECT_TRUE(modules[1]->named_parameters()[item.key()].equal(item.value())) << item.key();
    }
    EXPECT_EQ(modules[1]->own, 1 + 6);  // the first step of epoch 0, and all of epoch 1
  }
}

// Asked for at the end of an epoch, before ModelCheckpoint saves and removes the older checkpoint.
TEST(RollBack, WhatIsAskedForAtTheEndOfAnEpochIsNotSavedBefore) {
  struct AtEpochEnd final : Callback {
    void on_train_epoch_end(TrainerControl& trainer) override {
      const bool asks = trainer.state().epoch == 1;
      EXPECT_EQ(asks && trainer.roll_back(), asks);
    }
  };
  const testing::TempDir dir;
  const auto module = seeded_module();
  TrainerOptions options{.max_epochs = 2};
  options.callbacks = {std::make_shared<AtEpochEnd>()};
  options = quiet(options);
  options.default_root_dir = dir.path();
  options.enable_checkpointing = true;
  Trainer(options).fit(module, {.train = tiny_loader(4 * kBatchSize, kBatchSize)});
  const auto once = seeded_module();
  Trainer(quiet({.max_epochs = 1})).fit(once, {.train = tiny_loader(4 * kBatchSize, kBatchSize)});
  const auto saved = safetensors_of(dir.path() / "runs/version_0/checkpoints/last");
  for (const auto& item : once->named_parameters()) {
    EXPECT_TRUE(module->named_parameters()[item.key()].equal(item.value())) << item.key();
    EXPECT_TRUE(saved.at(item.key()).equal(item.value())) << item.key();
  }
}

// Step 3 is validated, then the weights are those of step 2 again, which fit saves at its end.
TEST(RollBack, AScoreIsNotThatOfOtherWeights) {
  struct LeavesLastOut : Counting {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      return batch_idx == 3 ? at::Tensor() : Counting::training_step(batch, batch_idx);
    }
  };
  const testing::TempDir dir;
  TrainerOptions options{.val_check_interval = Batches(3)};
  options.callbacks = {at_batch_end([](TrainerControl& trainer) {
                         if (trainer.state().batch_idx == 3) trainer.roll_back();
                       }),
                       ModelCheckpoint::make({.dirpath = dir.path(),
                                              .filename = "{step}-{val_loss}",
                                              .monitor = "val_loss",
                                              .save_top_k = -1,
                                              .every_n_train_steps = 2})};
  options = quiet(options);
  options.enable_checkpointing = true;
  Trainer(options).fit(make_module<LeavesLastOut>(),
                       {.train = tiny_loader(4 * kBatchSize, kBatchSize), .val = tiny_loader(8)});
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir.path())) {
    if (!entry.is_symlink()) names.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("step=2-val_loss=nan", "step=3-val_loss=nan"));
}

TEST(RollBack, WithoutACheckpointNothingHappens) {
  const Outcome outcome = fit({.strategy = "single_device", .saved_after = -1});
  EXPECT_FALSE(outcome.went_back);
  EXPECT_EQ(outcome.module->own, kBatches);
}

TEST(RollBack, TheCheckpointThatARunResumedFromCounts) {
  const testing::TempDir dir;
  TrainerOptions first{.max_steps = kSaved + 1};
  first.callbacks = {at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().batch_idx == kSaved) trainer.save_checkpoint(dir.path() / "saved");
  })};
  Trainer(quiet(first)).fit(seeded_module(), {.train = tiny_loader(kBatches * kBatchSize, kBatchSize)});
  const Outcome resumed = fit({.strategy = "single_device", .ckpt_path = dir.path() / "saved", .saved_after = -1});
  EXPECT_TRUE(resumed.went_back);
  const auto expected = plain_loop(1, /*late=*/false);
  for (const auto& item : expected->named_parameters()) {
    EXPECT_TRUE(resumed.module->named_parameters()[item.key()].allclose(item.value(), 1e-5, 1e-6)) << item.key();
  }
}

// A run that resumed from a checkpoint without one of its buffers goes back to it, too.
TEST(RollBack, TakesWhatTheRunResumedFromAsStrictlyAsResumingDid) {
  struct WithMore : Counting {
    at::Tensor more = register_buffer("more", at::zeros({1}));
  };
  const testing::TempDir dir;
  TrainerOptions first{.max_steps = kSaved + 1};
  first.callbacks = {at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().batch_idx == kSaved) trainer.save_checkpoint(dir.path() / "saved");
  })};
  const auto loader = [] { return tiny_loader(kBatches * kBatchSize, kBatchSize); };
  Trainer(quiet(first)).fit(seeded_module(), {.train = loader()});
  bool went_back = false;
  TrainerOptions options{.ckpt_path = (dir.path() / "saved").string(), .ckpt_strict = false};
  options.callbacks = {at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().batch_idx == kUndoneUpTo) went_back = trainer.roll_back();
  })};
  const auto module = make_module<WithMore>();
  Trainer(quiet(options)).fit(module, {.train = loader()});
  EXPECT_TRUE(went_back);
  EXPECT_EQ(module->own, kBatches - (kUndoneUpTo - kSaved));
}

TEST(RollBack, AGroupThatWasAddedSinceIsAnError) {
  struct Head : testing::TinyModule {
    Optimizers configure_optimizers() override { return optim::AdamW(out->parameters(), {.lr = kLr}); }
  };
  const testing::TempDir dir;
  const auto module = make_module<Head>();
  TrainerOptions options;
  options.callbacks = {at_batch_end([&](TrainerControl& trainer) {
    const int64_t batch_idx = trainer.state().batch_idx;
    if (batch_idx == 0) trainer.save_checkpoint(dir.path() / "saved");
    if (batch_idx == 1) trainer.optimizers()[0].add_param_group({.params = module->hidden->parameters()});
    if (batch_idx == 2) trainer.roll_back();
  })};
  const std::string message =
      message_of<CheckpointError>([&] { Trainer(quiet(options)).fit(module, {.train = tiny_loader(40, 8)}); });
  EXPECT_THAT(message, HasSubstr((dir.path() / "saved").string()));
  EXPECT_THAT(message, HasSubstr("the checkpoint has 1 parameter groups"));
}

// The factor holds for all later steps of a schedule, and for the runs that resume.
TEST(ScaleLr, HoldsForTheSchedule) {
  struct Scheduled : Counting {
    Optimizers configure_optimizers() override {
      return {optim::AdamW(parameters(), {.lr = 1.0}),
              {.scheduler = optim::StepLR::make({.step_size = 1, .gamma = 0.5}), .interval = "step"}};
    }
  };
  const testing::TempDir dir;
  const auto scale = at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().global_step == 2) trainer.scale_lr(0, 0, 0.1);
    if (trainer.state().global_step == 3) trainer.save_checkpoint(dir.path() / "saved");
  });
  const auto module = make_module<Scheduled>(), resumed = make_module<Scheduled>();
  TrainerOptions options = quiet({.max_steps = 5});
  options.callbacks = {scale};
  Trainer(options).fit(module, {.train = tiny_loader(40, 8)});
  using ::testing::DoubleEq;
  EXPECT_THAT(module->lrs, ElementsAre(1.0, 0.5, DoubleEq(0.025), DoubleEq(0.0125), DoubleEq(0.00625)));
  options.ckpt_path = dir.path() / "saved";
  Trainer(options).fit(resumed, {.train = tiny_loader(40, 8)});
  EXPECT_THAT(resumed->lrs, ElementsAre(module->lrs[3], module->lrs[4]));
}

TEST(ScaleLr, RefusesWhatIsNotThere) {
  const auto message = [](size_t optimizer, size_t group, double factor) {
    TrainerOptions options;
    options.callbacks = {at_batch_end([=](TrainerControl& trainer) { trainer.scale_lr(optimizer, group, factor); })};
    return message_of<UsageError>([&] { Trainer(quiet(options)).fit(seeded_module(), {.train = tiny_loader(8, 8)}); });
  };
  EXPECT_THAT(message(1, 0, 0.5), HasSubstr("there is no parameter group 0 of optimizer 1"));
  EXPECT_THAT(message(0, 1, 0.5), HasSubstr("there is no parameter group 1 of optimizer 0"));
  EXPECT_THAT(message(0, 0, 0.0), HasSubstr("must be above 0 and finite; got 0"));
  EXPECT_THAT(message(0, 0, std::numeric_limits<double>::infinity()), HasSubstr("got inf"));
}

}  // namespace
}  // namespace fulgur
