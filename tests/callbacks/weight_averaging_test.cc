#include "fulgur/callbacks/weight_averaging.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/presets/ddp_sharded.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/counting_allocator.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"
#include "tests/testing/without_warmup.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

constexpr int64_t kSteps = 5;

std::shared_ptr<TinyModule> seeded_module() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  seed_everything(3);
  return make_module<TinyModule>();
}

// Saves a checkpoint after every step.
struct SavesEachStep final : Callback {
  explicit SavesEachStep(fs::path given) : folder(std::move(given)) {}
  fs::path folder;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) override {
    trainer.save_checkpoint(folder / std::to_string(trainer.state().global_step));
  }
};

struct Given {
  std::string strategy, precision = "32";
  int64_t world_size = 1;
  std::string ckpt_path{};
  int64_t max_steps = kSteps;
  std::string shard_group = "all";
};

StrategyChoice strategy_of(const Given& run) {
  if (run.shard_group == "all") return testing::without_warmup(run.strategy);
  if (run.strategy == DelayedUpdate::kName) return DelayedUpdate{.warmup_steps = 0, .shard_group = run.shard_group};
  return DdpSharded{.shard_group = run.shard_group};
}

struct Outcome {
  std::shared_ptr<TinyModule> module;
  double val_loss = 0.0;
};

// Trains for kSteps steps and validates once, at the end. Returns what rank 0 has.
Outcome fit(const Given& run, const std::vector<std::shared_ptr<Callback>>& callbacks_of_rank_0,
            const std::function<std::vector<std::shared_ptr<Callback>>()>& make_callbacks) {
  Outcome outcome;
  const auto fit_rank = [&](int64_t rank) {
    const auto module = seeded_module();
    TrainerOptions options{.strategy = strategy_of(run), .precision = run.precision};
    options.max_steps = run.max_steps;
    options.ckpt_path = run.ckpt_path;
    if (run.strategy == "dp") options.devices = 2;
    if (run.world_size > 1) options.devices = run.world_size;
    options.callbacks = callbacks_of_rank_0.empty() || rank > 0 ? make_callbacks() : callbacks_of_rank_0;
    Trainer trainer(quiet(options));
    trainer.fit(module,
                {.train = tiny_loader(8 * kSteps * run.world_size, 8), .val = tiny_loader(16 * run.world_size)});
    if (rank == 0) outcome = {module, trainer.callback_metrics().at("val_loss")};
  };
  if (run.world_size == 1) {
    fit_rank(0);
  } else {
    testing::run_ranks(run.world_size, [&](World& world) { fit_rank(world.rank()); });
  }
  return outcome;
}

using Weights = std::map<std::string, at::Tensor>;

Weights weights_of(const NamedTensors& tensors) {
  Weights weights;
  for (const auto& [name, tensor] : tensors) weights[name] = tensor.to(at::kDouble);
  return weights;
}

// The trained weights after a step, which a checkpoint has beside their average.
Weights trained_weights(const fs::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  Weights weights;
  for (const auto& [name, tensor] : reader.weights()) {
    const StateTensors state = reader.read(name, 0, tensor.numel());
    weights[name] = state.at(state.contains("master") ? "master" : "raw").reshape(tensor.sizes()).to(at::kDouble);
  }
  return weights;
}

void expect_near(const Weights& weights, const Weights& expected, double tolerance) {
  ASSERT_EQ(weights.size(), expected.size());
  for (const auto& [name, tensor] : weights) {
    EXPECT_LE((tensor - expected.at(name)).abs().max().item<double>(), tolerance) << name;
  }
}

// The oracle is the formula, in fp64, over the trained weights in the checkpoint of each step.
void expect_average(const Given& run, const WeightAveragingOptions& averaging) {
  const testing::TempDir dir;
  const auto callbacks = [&]() -> std::vector<std::shared_ptr<Callback>> {
    return {WeightAveraging::make(averaging), std::make_shared<SavesEachStep>(dir.path())};
  };
  const Outcome outcome = fit(run, {}, callbacks);
  Weights average;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const fs::path checkpoint = dir.path() / std::to_string(step);
    const Weights trained = trained_weights(checkpoint);
    const double share = step == 1                   ? 1.0
                         : averaging.method == "swa" ? 1.0 / static_cast<double>(step)
                                                     : 1.0 - averaging.decay;
    for (const auto& [name, tensor] : trained) {
      average[name] = step == 1 ? tensor : average[name] + share * (tensor - average[name]);
    }
    SCOPED_TRACE(c10::str("step ", step));
    const CheckpointReader reader(checkpoint);
    expect_near(weights_of(reader.finished_weights()), average, 1e-6);
    expect_near(weights_of(reader.weights()), average, run.precision == "32" ? 1e-6 : 1e-2);
  }
  for (const auto& item : outcome.module->named_parameters()) {
    EXPECT_LE((item.value().to(at::kDouble) - average.at(item.key())).abs().max().item<double>(),
              run.precision == "32" ? 1e-6 : 1e-2);
  }
  Trainer trainer(quiet({.precision = run.precision}));
  const Metrics of_average = trainer.validate(outcome.module, {.val = tiny_loader(16 * run.world_size)});
  EXPECT_NEAR(outcome.val_loss, of_average.at("val_loss"), run.precision == "32" ? 1e-5 : 2e-3);
}

TEST(WeightAveraging, IsTheFormulaUnderEveryStrategy) {
  for (const char* strategy : {"single_device", "dp", "ddp", "ddp_sharded", "zero_offload", "delayed_update"}) {
    for (const char* precision : {"32", "bf16-true"}) {
      for (const int64_t world_size : {1, 2}) {
        if (world_size > 1 && (strategy == std::string_view("single_device") || strategy == std::string_view("dp")))
          continue;
        SCOPED_TRACE(c10::str(strategy, ", ", precision, ", ", world_size, " ranks"));
        expect_average({strategy, precision, world_size}, {.decay = 0.6});
      }
    }
  }
  expect_average({"ddp", "32", 2}, {.method = "swa"});
}

TEST(WeightAveraging, IsTheFormulaWhereSeveralGroupsOfRanksHaveTheShards) {
  for (const char* strategy : {"ddp_sharded", "delayed_update"}) {
    for (const char* precision : {"32", "bf16-true"}) {
      SCOPED_TRACE(c10::str(strategy, ", ", precision));
      expect_average({.strategy = strategy, .precision = precision, .world_size = 4, .shard_group = "2"},
                     {.decay = 0.6});
    }
  }
}

// Keeps the weights after each step.
struct KeepsWeights final : Callback {
  std::vector<std::vector<at::Tensor>> weights;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) override {
    auto& now = weights.emplace_back();
    for (const at::Tensor& param : trainer.module().parameters()) now.push_back(param.detach().clone());
  }
};

// Validations and checkpoints come and go; the run trains on as if nothing was averaged. So does one that resumes
// from a checkpoint with an average, without the callback.
TEST(WeightAveraging, DoesNotChangeTraining) {
  for (const char* strategy : {"ddp", "ddp_sharded", "delayed_update"}) {
    for (const char* precision : {"32", "bf16-true"}) {
      SCOPED_TRACE(c10::str(strategy, ", ", precision));
      const testing::TempDir dir;
      const Given run{strategy, precision, 2};
      const auto alone = std::make_shared<KeepsWeights>(), beside = std::make_shared<KeepsWeights>(),
                 resumed = std::make_shared<KeepsWeights>();
      fit(run, {alone}, [] { return std::vector<std::shared_ptr<Callback>>{std::make_shared<KeepsWeights>()}; });
      const auto averaging = [&]() -> std::vector<std::shared_ptr<Callback>> {
        return {WeightAveraging::make({.decay = 0.5}), std::make_shared<SavesEachStep>(dir.path())};
      };
      std::vector<std::shared_ptr<Callback>> of_rank_0 = averaging();
      of_rank_0.push_back(beside);
      fit(run, of_rank_0, averaging);
      Given going_on = run;
      going_on.ckpt_path = dir.path() / "2";
      fit(going_on, {resumed}, [] { return std::vector<std::shared_ptr<Callback>>{std::make_shared<KeepsWeights>()}; });
      ASSERT_EQ(alone->weights.size(), static_cast<size_t>(kSteps));
      ASSERT_EQ(resumed->weights.size(), static_cast<size_t>(kSteps - 2));
      for (size_t step = 0; step < alone->weights.size(); ++step) {
        for (size_t i = 0; i < alone->weights[step].size(); ++i) {
          EXPECT_TRUE(beside->weights[step][i].equal(alone->weights[step][i])) << step;
          if (step < 2) continue;
          EXPECT_TRUE(resumed->weights[step - 2][i].equal(alone->weights[step][i])) << step;
        }
      }
    }
  }
}

// The score of a checkpoint is that of the weights in it, also where the average is updated at the end of an epoch.
TEST(WeightAveraging, TheBestCheckpointHasTheAverageThatWasValidated) {
  const testing::TempDir dir;
  const auto saving = ModelCheckpoint::make({.dirpath = dir.path() / "saved", .monitor = "val_loss", .save_top_k = -1});
  TrainerOptions options = quiet({.max_epochs = 3});
  options.enable_checkpointing = true;
  options.default_root_dir = dir.path();
  options.callbacks = {WeightAveraging::make({.method = "swa", .every_n_steps = 0}), saving};
  Trainer trainer(options);
  trainer.fit(seeded_module(), {.train = tiny_loader(), .val = tiny_loader(16)});
  EXPECT_EQ(saving->best_k_models().size(), 3U);
  for (const auto& [path, score] : saving->best_k_models()) {
    const auto metrics = Trainer(quiet()).validate(make_module<TinyModule>(), {.val = tiny_loader(16)}, path);
    EXPECT_NEAR(metrics.at("val_loss"), score, 1e-6) << path;
  }
}

// 256 x 256 weights, so that the padding of buckets does not count.
struct Wide : testing::TinyModule {
  torch::nn::Linear wide{nullptr};
  Wide() { wide = register_module("wide", torch::nn::Linear(256, 256)); }
};

struct CountsBytes final : Callback {
  explicit CountsBytes(testing::CountingAllocator& given) : memory(given) {}
  testing::CountingAllocator& memory;
  int64_t live = 0;
  void on_train_batch_end(TrainerControl&, const at::Tensor&, const Batch&, int64_t) override { live = memory.live(); }
};

TEST(WeightAveraging, KeepsFourBytesForEachParameterAmongAllRanks) {
  testing::CountingAllocator memory;
  const auto bytes_of = [&](bool averages) {
    std::vector<int64_t> live(2);
    testing::run_ranks(2, [&](World& world) {
      const auto counter = std::make_shared<CountsBytes>(memory);
      TrainerOptions options{.strategy = "ddp", .devices = 2};
      options.max_steps = 2;
      if (averages) options.callbacks.push_back(WeightAveraging::make());
      options.callbacks.push_back(counter);
      Trainer(quiet(options)).fit(make_module<Wide>(), {.train = tiny_loader(64, 8)});
      live[static_cast<size_t>(world.rank())] = counter->live;
    });
    return live[0];
  };
  bytes_of(true);  // what is allocated once
  const int64_t without = bytes_of(false), with = bytes_of(true);
  const double parameters = 256 * 257;
  EXPECT_NEAR(static_cast<double>(with - without), 4 * parameters, 0.1 * 4 * parameters);
}

// Every element moves by 1 in each step.
struct MovesByOne : Module {
  at::Tensor weight;
  int64_t rank = 0;
  MovesByOne() { weight = register_parameter("weight", at::zeros({1024})); }
  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    return rank == 1 && batch_idx == 2 ? BatchAction::skip_epoch : BatchAction::run;
  }
  at::Tensor training_step(const Batch&, int64_t) override { return -weight.sum(); }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
};

// The rank that skips takes part in the step of the other, whose batch ends, and which updates its part of the average.
TEST(WeightAveraging, HasEveryStepAlsoWhereOneRankSkipsTheEpoch) {
  double expected = 1.0;  // the first update takes the weights as they are
  for (int step = 2; step <= 6; ++step) expected = 0.5 * expected + 0.5 * step;
  for (const char* strategy : {"ddp", "ddp_sharded"}) {
    testing::run_ranks(2, [&](World& world) {
      const auto module = make_module<MovesByOne>();
      module->rank = world.rank();
      TrainerOptions options{.strategy = strategy, .devices = 2, .max_epochs = 2};
      options.callbacks = {WeightAveraging::make({.decay = 0.5})};
      Trainer(quiet(options)).fit(module, {.train = tiny_loader(40, 4)});
      EXPECT_TRUE(at::equal(module->weight, at::full({1024}, expected))) << strategy << ", rank " << world.rank();
    });
  }
}

TEST(WeightAveraging, RefusesWhatCannotBeAveraged) {
  struct WithLamb : TinyModule {
    Optimizers configure_optimizers() override { return optim::LAMB(parameters(), {.lr = 1e-2}); }
  };
  const TrainerOptions options{.callbacks = {WeightAveraging::make()}};
  EXPECT_THAT(
      message_of<UsageError>([&] { Trainer(quiet(options)).fit(make_module<WithLamb>(), {.train = tiny_loader()}); }),
      HasSubstr("LAMB needs whole tensors; use an optimizer that derives from optim::ElementWiseOptimizer"));
  const TrainerOptions two{.callbacks = {WeightAveraging::make(), WeightAveraging::make({.decay = 0.5})}};
  EXPECT_THAT(
      message_of<SetupError>([&] { Trainer(quiet(two)).fit(make_module<TinyModule>(), {.train = tiny_loader()}); }),
      HasSubstr("two callbacks average weights"));
  EXPECT_THAT(message_of<UsageError>([] { WeightAveraging::make({.decay = 1.0}); }), HasSubstr("decay = 1"));
  EXPECT_THAT(message_of<UsageError>([] { WeightAveraging::make({.method = "emma"}); }),
              HasSubstr("did you mean 'ema'?"));
}

// A run that max_steps has cut goes on in the same epoch, whose end counts once.
TEST(WeightAveraging, AnEpochThatWasCutCountsWhenItEnds) {
  const testing::TempDir dir;
  const auto weights_after = [](TrainerOptions options) {
    options.max_epochs = 2;
    options.callbacks = {WeightAveraging::make({.method = "swa", .every_n_steps = 0})};
    if (!options.checkpoint.dirpath.empty()) options.callbacks.push_back(ModelCheckpoint::make(options.checkpoint));
    options.checkpoint = {};
    TrainerOptions all = quiet(options);
    all.enable_checkpointing = std::nullopt;
    const auto module = seeded_module();
    Trainer(all).fit(module, {.train = tiny_loader(8 * kSteps, 8)});
    return module;
  };
  const auto whole = weights_after({.checkpoint = {.dirpath = dir.path() / "whole"}});
  weights_after({.max_steps = kSteps + 2, .checkpoint = {.dirpath = dir.path() / "cut"}});
  const auto resumed = weights_after(
      {.ckpt_path = (dir.path() / "cut" / "last").string(), .checkpoint = {.dirpath = dir.path() / "resumed"}});
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(item.value().equal(resumed->named_parameters()[item.key()])) << item.key();
  }
}

}  // namespace
}  // namespace fulgur
