// Trainers on several ranks: threads that share a World.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"
#include "tests/testing/unsized_loader.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::run_ranks;
using testing::tiny_dataset;
using testing::TinyModule;

// Options of a Trainer of `world_size` CPU devices.
TrainerOptions ddp(const World& world, TrainerOptions options = {}) {
  if (options.strategy.is_auto()) options.strategy = "ddp";
  options.devices = world.world_size();
  return quiet(std::move(options));
}

// Weights that depend on nothing but the type: ranks are threads, and share the generator.
template <class M>
std::shared_ptr<M> seeded() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  seed_everything(5);
  return make_module<M>();
}

at::Tensor flat_weights(const torch::nn::Module& module) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : module.parameters()) parts.push_back(parameter.detach().flatten());
  return torch::cat(parts);
}

double relative_l2(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

// The results of training in one process or on rank 0.
struct Outcome {
  at::Tensor weights;
  std::vector<double> losses;  // mean over ranks, by batch
  Metrics metrics;
  RunState state;
};

template <class M>
using MakeModule = std::function<std::shared_ptr<M>()>;

template <class M>
Outcome train_alone(const TrainerOptions& options, Loaders loaders, const MakeModule<M>& make = seeded<M>) {
  const auto module = make();
  Trainer trainer(quiet(options));
  trainer.fit(module, std::move(loaders));
  return {flat_weights(*module), module->train_losses, trainer.callback_metrics(), trainer.state()};
}

// Every rank must have the same outcome, apart from the losses.
template <class M>
Outcome train_on_ranks(int64_t world_size, const TrainerOptions& options, const std::function<Loaders()>& loaders,
                       const MakeModule<M>& make = seeded<M>) {
  std::mutex mutex;
  std::vector<Outcome> outcomes(static_cast<size_t>(world_size));
  run_ranks(world_size, [&](World& world) {
    const auto module = make();
    Trainer trainer(ddp(world, options));
    trainer.fit(module, loaders());
    const std::lock_guard lock(mutex);
    outcomes[static_cast<size_t>(world.rank())] = {flat_weights(*module), module->train_losses,
                                                   trainer.callback_metrics(), trainer.state()};
  });
  Outcome first = outcomes[0];
  for (size_t rank = 1; rank < outcomes.size(); ++rank) {
    EXPECT_TRUE(outcomes[rank].weights.equal(first.weights)) << "rank " << rank;
    EXPECT_EQ(outcomes[rank].state.global_step, first.state.global_step);
    EXPECT_EQ(outcomes[rank].state.epoch, first.state.epoch);
    for (size_t i = 0; i < std::min(first.losses.size(), outcomes[rank].losses.size()); ++i) {
      first.losses[i] += outcomes[rank].losses[i];
    }
  }
  for (double& loss : first.losses) loss /= static_cast<double>(world_size);
  return first;
}

struct SgdModule : TinyModule {
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.1, .momentum = 0.9}); }
};
struct AdagradOfTorch : TinyModule {
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(
        std::make_unique<torch::optim::Adagrad>(parameters(), torch::optim::AdagradOptions(0.1)));
  }
};

struct Case {
  std::string strategy;
  int64_t world_size;
};

class Ranks : public ::testing::TestWithParam<Case> {
 protected:
  int64_t world_size() const { return GetParam().world_size; }
  TrainerOptions with_strategy(TrainerOptions options = {}) const {
    options.strategy = GetParam().strategy;
    return options;
  }
  // Batches of 4 for each rank, or of 4 * world_size for one process; 48 samples.
  std::function<Loaders()> loaders() const {
    return [] { return Loaders{.train = loader(4), .val = loader(4)}; };
  }
  Loaders loaders_alone() const { return {.train = loader(4 * world_size()), .val = loader(4)}; }
  static std::shared_ptr<DataLoader> loader(int64_t batch_size) {
    return DataLoader::make(tiny_dataset(48), {.batch_size = batch_size, .shuffle = true, .seed = 3});
  }
};

class RanksWithWholeGradients : public Ranks {};  // for tests that need whole gradients

// Gradients are averaged over ranks, whose batches together are the large one.
TEST_P(Ranks, OneStepEqualsOneProcessWithTheWholeBatch) {
  const TrainerOptions options{.max_steps = 1};
  const Outcome expected = train_alone<SgdModule>(options, loaders_alone());
  const Outcome got = train_on_ranks<SgdModule>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-6);
}

TEST_P(Ranks, FiftyStepsHaveTheLossesOfOneProcess) {
  const TrainerOptions options{.max_steps = 50, .gradient_clip_val = 0.5};
  const Outcome expected = train_alone<TinyModule>(options, loaders_alone());
  const Outcome got = train_on_ranks<TinyModule>(world_size(), with_strategy(options), loaders());
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << i;
  }
}

TEST_P(Ranks, InDoublePrecisionTheyAgreeToTheLastDigits) {
  const TrainerOptions options{.max_epochs = 5, .precision = "64"};
  const Outcome expected = train_alone<SgdModule>(options, loaders_alone());
  const Outcome got = train_on_ranks<SgdModule>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
  EXPECT_NEAR(got.metrics.at("val_loss"), expected.metrics.at("val_loss"), 1e-9);
}

TEST_P(Ranks, AccumulationDividesByTheMicroBatchesOfAllRanks) {
  const TrainerOptions options{.max_epochs = 2, .precision = "64", .accumulate_grad_batches = 5};
  const Outcome expected = train_alone<SgdModule>(options, loaders_alone());
  const Outcome got = train_on_ranks<SgdModule>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
  EXPECT_EQ(got.state.global_step, expected.state.global_step);
}

TEST_P(RanksWithWholeGradients, AnAdaptedTorchOptimizerWorks) {
  const TrainerOptions options{.max_epochs = 2, .precision = "64"};
  const Outcome expected = train_alone<AdagradOfTorch>(options, loaders_alone());
  const Outcome got = train_on_ranks<AdagradOfTorch>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
}

struct LbfgsModule : TinyModule {
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(std::make_unique<torch::optim::LBFGS>(parameters(), torch::optim::LBFGSOptions(0.1)));
  }
};

TEST_P(RanksWithWholeGradients, AnOptimizerThatEvaluatesTheLossItselfWorks) {
  const TrainerOptions options{.max_steps = 2, .precision = "64"};
  const Outcome expected = train_alone<LbfgsModule>(options, loaders_alone());
  const Outcome got = train_on_ranks<LbfgsModule>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-6);
}

struct Manual : SgdModule {
  Manual() { automatic_optimization = false; }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = loss(batch);
    train_losses.push_back(value.item<double>());
    ManualOptimizer opt = optimizer();
    opt.zero_grad();
    manual_backward(value);
    manual_backward(loss(batch) * 2);  // added to the first gradient
    opt.step();
    return value;
  }
};

TEST_P(RanksWithWholeGradients, ManualOptimizationSeesMeansOverRanks) {
  const TrainerOptions options{.max_epochs = 2, .precision = "64"};
  const Outcome expected = train_alone<Manual>(options, loaders_alone());
  const Outcome got = train_on_ranks<Manual>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
}

struct Unequal : TinyModule {  // each rank would train a model of its own
  static inline std::atomic<int> counter{0};
  Unequal() {
    const c10::NoGradGuard no_grad;
    hidden->weight.add_(counter++);
  }
};

TEST_P(Ranks, EveryRankStartsFromTheParametersOfRank0) {
  train_on_ranks<Unequal>(world_size(), with_strategy({.max_epochs = 1}), loaders(),
                          [] { return make_module<Unequal>(); });
}

struct Normed : TinyModule {
  torch::nn::BatchNorm1d norm{nullptr};
  Normed() { norm = register_module("norm", torch::nn::BatchNorm1d(4)); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return TinyModule::training_step({{"x", norm->forward(batch["x"])}, {"y", batch["y"]}}, batch_idx);
  }
};

TEST_P(Ranks, BuffersAreThoseOfRank0) {
  std::mutex mutex;
  std::vector<at::Tensor> means(static_cast<size_t>(world_size()));
  run_ranks(world_size(), [&](World& world) {
    const auto module = seeded<Normed>();
    Trainer(ddp(world, with_strategy())).fit(module, loaders()());
    const std::lock_guard lock(mutex);
    means[static_cast<size_t>(world.rank())] = module->norm->running_mean.clone();
  });
  for (const at::Tensor& mean : means) EXPECT_TRUE(mean.equal(means[0]));
  EXPECT_GT(means[0].norm().item<double>(), 0);
}

// The running means are those of a loop over the batches of the rank itself, or of rank 0.
TEST(RanksWithBuffers, KeepTheirOwnWhereNoneAreBroadcast) {
  for (const bool broadcasts : {false, true}) {
    run_ranks(2, [&](World& world) {
      const auto module = seeded<Normed>();
      Trainer(ddp(world, {.strategy = Ddp{.broadcast_buffers = broadcasts}}))
          .fit(module, {.train = testing::tiny_loader(16, 4)});
      torch::nn::BatchNorm1d expected(4);
      const auto loader = testing::tiny_loader(16, 4);
      loader->set_shard({.rank = broadcasts ? 0 : world.rank(), .world_size = 2});
      loader->begin_epoch(0);
      while (const auto batch = loader->next()) expected->forward((*batch)["x"]);
      EXPECT_TRUE(module->norm->running_mean.equal(expected->running_mean)) << broadcasts << ", rank " << world.rank();
    });
  }
}

TEST(RanksThatReadTheirData, SeeAllOfItWhereItIsNotSharded) {
  struct Keeps : TinyModule {
    std::set<double> seen;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      for (int64_t i = 0; i < batch.batch_size(); ++i) seen.insert(batch["x"][i][0].item<double>());
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  for (const bool shards : {false, true}) {
    std::vector<std::set<double>> seen(2);
    run_ranks(2, [&](World& world) {
      const auto module = seeded<Keeps>();
      TrainerOptions options = ddp(world);
      options.use_distributed_sampler = shards;
      Trainer(options).fit(module, {.train = testing::tiny_loader(16, 4)});
      seen[static_cast<size_t>(world.rank())] = module->seen;
    });
    for (const auto& of_rank : seen) EXPECT_EQ(of_rank.size(), shards ? 8U : 16U);
    seen[0].merge(seen[1]);
    EXPECT_EQ(seen[0].size(), 16U);
  }
}

struct SyncNormed : SgdModule {
  nn::SyncBatchNorm1d norm{nullptr};
  SyncNormed() { norm = register_module("norm", nn::SyncBatchNorm1d(4)); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return SgdModule::training_step({{"x", norm->forward(batch["x"])}, {"y", batch["y"]}}, batch_idx);
  }
};

TEST_P(Ranks, SyncBatchNormSeesTheWholeBatch) {
  const TrainerOptions options{.max_epochs = 2, .precision = "64", .sync_batchnorm = true};
  const Outcome expected = train_alone<SyncNormed>(options, loaders_alone());
  const Outcome got = train_on_ranks<SyncNormed>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
}

TEST(RanksThatFail, PlainBatchNormWithSyncBatchnorm) {
  EXPECT_THAT(message_of<UsageError>([] {
                Trainer(quiet({.sync_batchnorm = true})).fit(make_module<Normed>(), {.train = testing::tiny_loader()});
              }),
              HasSubstr("sync_batchnorm is true, but norm of "));
}

struct PartlyUsed : SgdModule {
  torch::nn::Linear unused{nullptr}, of_rank_0{nullptr};
  int64_t rank = 0;
  PartlyUsed() {
    unused = register_module("unused", torch::nn::Linear(4, 4));
    of_rank_0 = register_module("of_rank_0", torch::nn::Linear(4, 1));
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    at::Tensor value = TinyModule::training_step(batch, batch_idx);
    if (rank == 0) value = value + of_rank_0->forward(batch["x"]).mean();
    return value;
  }
};

TEST_P(Ranks, AParameterThatNoRankUsesIsLeftAloneAndOneThatSomeUseIsNot) {
  run_ranks(world_size(), [&](World& world) {
    const auto module = seeded<PartlyUsed>();
    module->rank = world.rank();
    const at::Tensor unused = module->unused->weight.detach().clone();
    const at::Tensor bias = module->of_rank_0->bias.detach().clone();
    Trainer(ddp(world, with_strategy({.max_steps = 1}))).fit(module, loaders()());
    EXPECT_TRUE(module->unused->weight.equal(unused));
    const auto expected = bias - 0.1 / static_cast<double>(world.world_size());  // lr * mean of 1, 0, 0, ...
    EXPECT_TRUE(torch::allclose(module->of_rank_0->bias, expected)) << world.rank();
  });
}

struct SkipsOnRank1 : SgdModule {
  int64_t rank = 0;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (rank == 1) return {};
    return TinyModule::training_step(batch, batch_idx);
  }
};

TEST_P(Ranks, ARankWithoutALossTakesPartInTheStep) {
  run_ranks(world_size(), [&](World& world) {
    const auto module = seeded<SkipsOnRank1>();
    module->rank = world.rank();
    Trainer trainer(ddp(world, with_strategy()));
    trainer.fit(module, {.train = loader(4)});
    const int64_t batches = (48 / world.world_size() + 3) / 4;
    EXPECT_EQ(trainer.state().global_step, batches);
  });
}

TEST_P(Ranks, AStopThatOneRankAsksForStopsAll) {
  run_ranks(world_size(), [&](World& world) {
    TrainerOptions options = ddp(world, with_strategy({.max_epochs = 10}));
    options.callbacks = {std::make_shared<testing::AtBatchEnd>([&](TrainerControl& trainer) {
      if (world.rank() == world.world_size() - 1 && trainer.state().global_step == 2) trainer.request_stop("enough");
    })};
    Trainer trainer(options);
    trainer.fit(seeded<TinyModule>(), loaders()());
    EXPECT_EQ(trainer.state().global_step, world.world_size() == 1 ? 2 : 3);
  });
}

TEST_P(Ranks, LoadersOfUnknownLengthEndTogether) {
  run_ranks(world_size(), [&](World& world) {
    Trainer trainer(ddp(world, with_strategy({.max_epochs = 2})));
    const int64_t batches = 3 + world.rank();
    trainer.fit(seeded<TinyModule>(),
                {.train = std::make_shared<testing::UnsizedLoader>(testing::tiny_loader(4 * batches, 4))});
    EXPECT_EQ(trainer.state().global_step, 6);
  });
}

struct SkipsTheEpoch : TinyModule {
  int64_t rank = 0;
  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    return rank == 0 && batch_idx == 1 ? BatchAction::skip_epoch : BatchAction::run;
  }
};

TEST_P(Ranks, AnEpochThatOneRankSkipsEndsOnAll) {
  run_ranks(world_size(), [&](World& world) {
    const auto module = seeded<SkipsTheEpoch>();
    module->rank = world.rank();
    Trainer trainer(ddp(world, with_strategy({.max_epochs = 2})));
    trainer.fit(module, loaders()());
    const bool others_step = world.world_size() > 1;  // the other ranks complete the step in progress
    EXPECT_EQ(trainer.state().global_step, others_step ? 4 : 2);
  });
}

// The rank that skips neither validates nor saves after the batch, and so the others must not. The batch that one rank
// skips is the last for the others or is not, or ends their accumulation window, in which a validation has become due.
TEST_P(Ranks, AnEpochThatOneRankSkipsEndsOnAllWithoutItsValidationAndCheckpoint) {
  for (const auto& [num_batches, accumulate] : {std::pair{2, 1}, std::pair{4, 1}, std::pair{4, 2}, std::pair{6, 3}}) {
    const testing::TempDir dir;
    run_ranks(world_size(), [&](World& world) {
      const auto module = seeded<SkipsTheEpoch>();
      module->rank = world.rank();
      TrainerOptions options =
          ddp(world,
              with_strategy({.max_epochs = 3,
                             .val_check_interval = Batches(1),
                             .accumulate_grad_batches = accumulate,
                             .callbacks = {ModelCheckpoint::make({.dirpath = dir.path(), .every_n_train_steps = 1})}}));
      options.enable_checkpointing = true;
      Trainer trainer(options);
      trainer.fit(module, {.train = testing::tiny_loader(num_batches * 4 * world.world_size(), 4),
                           .val = testing::tiny_loader(8 * world.world_size(), 8)});
      EXPECT_EQ(trainer.state().epoch, 3);
    });
  }
}

struct SkipsWithAPlateau : SkipsTheEpoch {
  std::vector<double> lrs;
  Optimizers configure_optimizers() override {
    return {optim::SGD(parameters(), {.lr = 0.5}),
            {.scheduler = optim::ReduceLROnPlateau::make({.mode = "max", .factor = 0.5, .patience = 0}),
             .interval = "step",
             .monitor = "falls"}};
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("falls", -static_cast<double>(global_step()));
    return TinyModule::training_step(batch, batch_idx);
  }
  void on_train_epoch_end() override { lrs.push_back(optimizers()[0].groups()[0].lr); }
};

// The step that the skipping rank completes moves a schedule by steps on every rank: all but the first halve the rate.
TEST_P(Ranks, APlateauMovesInTheStepThatASkippedEpochCompletes) {
  run_ranks(world_size(), [&](World& world) {
    const auto module = seeded<SkipsWithAPlateau>();
    module->rank = world.rank();
    Trainer trainer(ddp(world, with_strategy({.max_epochs = 2})));
    trainer.fit(module, loaders()());
    const double steps_of_epoch = world.world_size() > 1 ? 2 : 1;
    EXPECT_THAT(module->lrs,
                ElementsAre(0.5 * std::pow(0.5, steps_of_epoch - 1), 0.5 * std::pow(0.5, 2 * steps_of_epoch - 1)));
  });
}

// A conjugate that torch has not computed yet.
TEST(RanksWithLazyBuffers, BroadcastTheirValues) {
  struct WithLazyBuffer : TinyModule {
    at::Tensor wave = register_buffer("wave", torch::complex(torch::ones({2}), torch::full({2}, 3.0)).conj());
  };
  run_ranks(2, [](World& world) {
    const auto module = seeded<WithLazyBuffer>();
    if (world.rank() == 1) {
      const at::NoGradGuard no_grad;
      module->wave.zero_();
    }
    TrainerOptions options = testing::quiet({.strategy = "ddp", .devices = 2, .max_steps = 1});
    Trainer(options).fit(module, {.train = testing::tiny_loader(16, 4)});
    EXPECT_TRUE(torch::imag(module->wave).eq(-3.0).all().item<bool>()) << world.rank();
  });
}

// A collective takes no numbers of 8 bits.
TEST(RanksWithMetrics, StatesMayHaveEveryType) {
  class Counts final : public Metric {
   public:
    Counts()
        : Metric("Counts",
                 {{"small", at::zeros({}, at::kChar)}, {"rows", at::zeros({0, 1}, at::kShort), Combine::concatenate}}) {
    }
    void add() { accumulate({at::ones({}, at::kChar), at::full({1, 1}, 5, at::kShort)}); }

   protected:
    at::Tensor value_of(std::span<const at::Tensor> states) const override {
      return states[0].to(at::kDouble) + states[1].sum().to(at::kDouble);
    }
  };
  struct Logs : TinyModule {
    Counts counts;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      counts.add();
      log("counts", counts);
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  run_ranks(2, [](World&) {
    Trainer trainer(testing::quiet({.strategy = "ddp", .devices = 2}));
    trainer.fit(seeded<Logs>(), {.train = testing::tiny_loader(24, 4)});  // 3 batches on each rank
    EXPECT_EQ(trainer.callback_metrics().at("counts"), 6 + 6 * 5);
  });
}

struct SkipsWithAClosure : SkipsTheEpoch {
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(0.1).max_iter(2)));
  }
};

// The other ranks are in the middle of an update in which all ranks evaluate the loss together.
TEST(RanksWithAClosure, RefuseThatOnlySomeSkipAnEpoch) {
  EXPECT_THAT(message_of<SetupError>([] {
                run_ranks(2, [](World& world) {
                  const auto module = seeded<SkipsWithAClosure>();
                  module->rank = world.rank();
                  Trainer(ddp(world)).fit(module, {.train = testing::tiny_loader(48, 4)});
                });
              }),
              AllOf(HasSubstr("skip_epoch"), HasSubstr("on every rank")));
}

TEST(RanksWithAClosure, AreToldThatTheyHaveOtherNumbersOfThreads) {
  for (const bool is_equal : {true, false}) {
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](World& world) {
      at::get_num_threads();  // the first call in a thread sets the number
      at::set_num_threads(is_equal ? 1 : 1 + static_cast<int>(world.rank()));
      Trainer(ddp(world)).fit(seeded<SkipsWithAClosure>(), {.train = testing::tiny_loader(8, 4)});
    });
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(told.find("rank 0 computes with 1 threads and rank 1 with 2") == std::string::npos, is_equal) << told;
  }
}

TEST(RanksWithAClosure, SkipAnEpochTogether) {
  run_ranks(2, [](World& world) {
    Trainer trainer(ddp(world, {.max_epochs = 2}));
    trainer.fit(seeded<SkipsWithAClosure>(), {.train = testing::tiny_loader(48, 4)});
    EXPECT_EQ(trainer.state().global_step, 2);
  });
}

TEST_P(Ranks, EverySampleIsEvaluatedOnce) {
  struct Counts : TinyModule {
    void test_step(const Batch& batch, int64_t) override {
      log("count", 1.0, {.reduce_fx = Reduction::sum, .batch_size = 1});
      log("samples", static_cast<double>(batch.batch_size()), {.reduce_fx = Reduction::sum});
      log("test_loss", loss(batch));
    }
    Batch predict_step(const Batch& batch, int64_t) override { return {{"x", batch["x"]}}; }
  };
  const auto data = DataLoader::make(tiny_dataset(43), {.batch_size = 4});
  const Metrics alone = Trainer(quiet()).test(seeded<Counts>(), {.test = data});
  std::atomic<int64_t> predicted = 0;
  run_ranks(world_size(), [&](World& world) {
    const auto loader = DataLoader::make(tiny_dataset(43), {.batch_size = 4});
    Trainer trainer(ddp(world, with_strategy()));
    const Metrics metrics = trainer.test(seeded<Counts>(), {.test = loader});
    EXPECT_EQ(metrics.at("samples"), 43);
    EXPECT_NEAR(metrics.at("test_loss"), alone.at("test_loss"), 1e-6);
    for (const Batch& batch : trainer.predict(seeded<Counts>(), {.predict = loader})) predicted += batch.batch_size();
  });
  EXPECT_EQ(predicted, 43);
}

TEST_P(Ranks, FilesAreWrittenOnce) {
  const testing::TempDir dir;
  run_ranks(world_size(), [&](World& world) {
    const auto checkpoint = ModelCheckpoint::make({.monitor = "val_loss"});
    Trainer trainer({.accelerator = "cpu",
                     .strategy = GetParam().strategy,
                     .devices = world.world_size(),
                     .max_epochs = 3,
                     .default_root_dir = dir.path().string(),
                     .enable_progress_bar = false,
                     .enable_model_summary = false,
                     .callbacks = {checkpoint}});
    trainer.fit(seeded<TinyModule>(), loaders()());
    EXPECT_TRUE(std::filesystem::exists(checkpoint->best_model_path() / "model.safetensors"));
  });
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path() / "runs"))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, ElementsAre("version_0"));
  std::set<std::filesystem::path> linked, checkpoints;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path() / "runs/version_0/checkpoints")) {
    (entry.is_symlink() ? linked : checkpoints).insert(std::filesystem::canonical(entry.path()));
  }
  EXPECT_EQ(checkpoints, linked);  // the best and the newest, which may be one
}

// A layer that is frozen at first and trained from epoch 1 on.
struct ThawsInEpoch1 : TinyModule {
  ThawsInEpoch1() {
    for (at::Tensor& param : hidden->parameters()) param.requires_grad_(false);
  }
  Optimizers configure_optimizers() override { return optim::SGD(out->parameters(), {.lr = 0.1, .momentum = 0.9}); }
  void on_train_epoch_start() override {
    if (current_epoch() != 1) return;
    for (at::Tensor& param : hidden->parameters()) param.requires_grad_(true);
    optimizers()[0].add_param_group({.params = hidden->parameters(), .lr = 0.01});
  }
};

TEST_P(Ranks, AGroupThatIsAddedAtTheStartOfAnEpochIsTrainedAsInOneProcess) {
  const TrainerOptions options{.max_epochs = 3, .precision = "64"};
  const Outcome expected = train_alone<ThawsInEpoch1>(options, loaders_alone());
  const Outcome got = train_on_ranks<ThawsInEpoch1>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
}

// A layer that is frozen after the first of two micro-batches, and trained again from the second of two on.
struct FreezesBetweenMicroBatches : TinyModule {
  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    for (at::Tensor& param : hidden->parameters()) {
      if (current_epoch() == 1 && batch_idx == 1) param.requires_grad_(false);
      if (current_epoch() == 2 && batch_idx == 1) param.requires_grad_(true);
    }
    return BatchAction::run;
  }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.1, .momentum = 0.9}); }
};

TEST_P(Ranks, ALayerThatIsFrozenBetweenMicroBatchesIsTrainedAsInOneProcess) {
  const TrainerOptions options{.max_epochs = 4, .precision = "64", .accumulate_grad_batches = 2};
  const Outcome expected = train_alone<FreezesBetweenMicroBatches>(options, loaders_alone());
  const Outcome got = train_on_ranks<FreezesBetweenMicroBatches>(world_size(), with_strategy(options), loaders());
  EXPECT_LT(relative_l2(got.weights, expected.weights), 1e-9);
}

// A layer that is frozen while an update of it is in progress, in an epoch whose first batch one rank skips.
struct FreezesInEpoch1AndSkips : TinyModule {
  int64_t rank = 0;
  void on_train_epoch_start() override {
    if (current_epoch() != 1) return;
    for (at::Tensor& param : hidden->parameters()) param.requires_grad_(false);
  }
  BatchAction on_train_batch_start(const Batch&, int64_t) override {
    return rank == 1 && current_epoch() == 1 ? BatchAction::skip_epoch : BatchAction::run;
  }
};

TEST(RanksWithALateUpdate, ALayerMayBeFrozenWhereOneRankSkipsTheEpoch) {
  run_ranks(2, [](World& world) {
    const auto module = seeded<FreezesInEpoch1AndSkips>();
    module->rank = world.rank();
    Trainer trainer(ddp(world, {.strategy = DelayedUpdate{.base = "ddp", .warmup_steps = 0}, .max_epochs = 3}));
    trainer.fit(module, {.train = testing::tiny_loader(16, 4)});
    EXPECT_EQ(trainer.state().epoch, 3);
  });
}

TEST_P(Ranks, KnowWhichTheyAreAndMayAskForAStop) {
  struct Asking : TinyModule {
    std::vector<int64_t> known;
    void on_train_start() override {
      known = {global_rank(), world_size(), is_global_zero() ? 1 : 0, device().is_cpu() ? 1 : 0};
    }
    void on_train_epoch_end() override {
      if (global_rank() == world_size() - 1) request_stop("enough");
    }
  };
  run_ranks(world_size(), [&](World& world) {
    const auto module = seeded<Asking>();
    Trainer trainer(ddp(world, with_strategy({.max_epochs = 5})));
    trainer.fit(module, loaders()());
    EXPECT_THAT(module->known, ElementsAre(world.rank(), world_size(), world.rank() == 0 ? 1 : 0, 1));
    EXPECT_EQ(trainer.state().epoch, 1);
  });
}

class Gathering : public ::testing::TestWithParam<std::tuple<int64_t, bool>> {
 protected:
  int64_t world_size() const { return std::get<0>(GetParam()); }
  WorldOptions through() const {
    WorldOptions options{.timeout_s = testing::kRanksTimeoutS, .heartbeat_interval_s = 0.1};
    options.collectives.shared_memory = std::get<1>(GetParam());
    return options;
  }
  // Runs `in_validation` once on every rank, as a module's hook.
  void run(const std::function<void(Module&, int64_t rank)>& in_validation) const {
    struct Gathers : TinyModule {
      std::function<void(Module&)> hook;
      void on_validation_epoch_end() override { hook(*this); }
    };
    run_ranks(world_size(), through(), [&](World& world) {
      const auto module = seeded<Gathers>();
      module->hook = [&](Module& own) { in_validation(own, world.rank()); };
      Trainer(ddp(world, {.strategy = "ddp"})).validate(module, {.val = testing::tiny_loader(16, 2)});
    });
  }
};

TEST_P(Gathering, BringsTheTensorsOfAllRanksToEach) {
  std::atomic<int64_t> calls = 0;
  run([&](Module& module, int64_t rank) {
    const auto of_rank = [&](int64_t r) { return torch::arange(6).view({2, 3}) + 100 * r; };
    for (const at::ScalarType type : {at::kFloat, at::kLong, at::kBFloat16, at::kShort}) {
      const at::Tensor all = module.all_gather(of_rank(rank).to(type).t());
      ASSERT_EQ(all.sizes(), (std::vector<int64_t>{world_size(), 3, 2}));
      for (int64_t r = 0; r < world_size(); ++r) EXPECT_TRUE(all[r].equal(of_rank(r).to(type).t())) << type;
    }
    const at::Tensor scalars = module.all_gather(torch::tensor(1.5 * static_cast<double>(rank)).requires_grad_());
    EXPECT_TRUE(scalars.equal(torch::arange(world_size(), torch::kFloat) * 1.5));
    EXPECT_FALSE(scalars.requires_grad());
    EXPECT_EQ(module.all_gather(torch::empty({0, 4})).sizes(), (std::vector<int64_t>{world_size(), 0, 4}));
    ++calls;
  });
  EXPECT_EQ(calls, world_size());
}

TEST_P(Gathering, RefusesTensorsThatDifferOnEveryRank) {
  run([&](Module& module, int64_t rank) {
    const auto told = [&](const at::Tensor& tensor) {
      return message_of<c10::ValueError>([&] { module.all_gather(tensor); });
    };
    EXPECT_THAT(told({}), HasSubstr("rank 0 gave an undefined tensor"));
    if (world_size() == 1) return;
    EXPECT_THAT(told(torch::zeros({rank + 1, 3})),
                HasSubstr("every rank must give a tensor of the same shape and type; rank 0 gave Float [1, 3], rank 1 "
                          "gave Float [2, 3]"));
    EXPECT_THAT(told(torch::zeros({2}, rank == 0 ? at::kFloat : at::kInt)), HasSubstr("rank 1 gave Int [2]"));
    EXPECT_THAT(told(rank == 1 ? at::Tensor() : torch::zeros({2})), HasSubstr("rank 1 gave an undefined tensor"));
    EXPECT_EQ(module.all_gather(torch::ones(1)).numel(), world_size());  // the ranks can still communicate
  });
}

INSTANTIATE_TEST_SUITE_P(, Gathering, ::testing::Values(std::tuple(1, true), std::tuple(2, true), std::tuple(2, false)),
                         [](const auto& test) {
                           return (std::get<1>(test.param) ? "SharedMemory" : "Gloo") +
                                  std::to_string(std::get<0>(test.param));
                         });

TEST_P(Ranks, LeaveNoEmptyFolder) {
  const testing::TempDir dir;
  run_ranks(world_size(), [&](World& world) {
    TrainerOptions options = ddp(world, with_strategy());
    options.default_root_dir = dir.path().string();
    Trainer(options).fit(seeded<TinyModule>(), loaders()());
  });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

INSTANTIATE_TEST_SUITE_P(, Ranks,
                         ::testing::Values(Case{"ddp", 1}, Case{"ddp", 2}, Case{"ddp", 3}, Case{"ddp", 4},
                                           Case{"ddp_sharded", 1}, Case{"ddp_sharded", 2}, Case{"ddp_sharded", 3},
                                           Case{"ddp_sharded", 4}, Case{"zero_offload", 1}, Case{"zero_offload", 2},
                                           Case{"zero_offload", 3}, Case{"zero_offload", 4}),
                         [](const auto& test) { return test.param.strategy + std::to_string(test.param.world_size); });
INSTANTIATE_TEST_SUITE_P(, RanksWithWholeGradients,
                         ::testing::Values(Case{"ddp", 1}, Case{"ddp", 2}, Case{"ddp", 3}, Case{"ddp", 4}),
                         [](const auto& test) { return test.param.strategy + std::to_string(test.param.world_size); });

// Expects every rank's body to end, though the ranks can no longer communicate.
void run_failing_ranks(int64_t world_size, const std::function<void(World&)>& body) {
  std::atomic<int64_t> ended = 0;
  const auto counted = [&](World& world) {
    body(world);
    ++ended;
  };
  EXPECT_THROW(run_ranks(world_size, counted), DistributedError);
  EXPECT_EQ(ended, world_size);
}

TEST(RanksThatShard, SayHowManyBytesAHookMakesThemGather) {
  struct Looks : TinyModule {
    void on_before_optimizer_step(Optimizer&) override {}
  };
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](World& world) {
    Trainer(ddp(world, {.strategy = "ddp_sharded"})).fit(seeded<Looks>(), {.train = testing::tiny_loader(8, 2)});
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ContainsRegex("gathers all of them \\([1-9][0-9]+ bytes\\)"));
}

TEST(RanksThatFail, AnExceptionOnOneRankEndsAll) {
  struct Throws : TinyModule {
    int64_t rank = 0;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (rank == 1 && batch_idx == 2) throw std::runtime_error("boom");
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  run_failing_ranks(3, [&](World& world) {
    const auto module = seeded<Throws>();
    module->rank = world.rank();
    const std::string message = message_of<std::runtime_error>(
        [&] { Trainer(ddp(world)).fit(module, {.train = testing::tiny_loader(48, 4)}); });
    const std::string place = "in training_step (train, epoch 0, batch 2 with x [4, 4] float, y [4, 1] float, rank 1)";
    EXPECT_THAT(message, HasSubstr(world.rank() == 1 ? "boom" : "rank 1 failed at step 2: " + place + ": boom"));
  });
}

// The ranks save together while an update is in progress, which they show together.
TEST(RanksThatFail, ASaveThatThrowsOnOneRankEndsAll) {
  struct Throws : TinyModule {
    int64_t rank = 0;
    void on_save_checkpoint(State&) override {
      if (rank == 1) throw std::runtime_error("boom");
    }
  };
  const testing::TempDir dir;
  run_failing_ranks(2, [&](World& world) {
    const auto module = seeded<Throws>();
    module->rank = world.rank();
    const auto saves = testing::at_batch_end([&](TrainerControl& trainer) {
      if (trainer.state().batch_idx == 2) trainer.save_checkpoint(dir.path() / "saved");
    });
    TrainerOptions options = ddp(world, {.callbacks = {saves}});
    options.strategy = DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0, .ranks = {.timeout_s = 30}};
    const std::string message =
        message_of<std::runtime_error>([&] { Trainer(options).fit(module, {.train = testing::tiny_loader(48, 4)}); });
    EXPECT_THAT(message, HasSubstr("boom"));
  });
}

TEST(RanksThatFail, ParametersThatDifferAreNamed) {
  struct Wide : Module {
    explicit Wide(int64_t width) { register_module("layer", torch::nn::Linear(4, width)); }
    at::Tensor training_step(const Batch&, int64_t) override { return {}; }
    Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.1}); }
  };
  run_failing_ranks(2, [&](World& world) {
    const auto module = make_module<Wide>(world.rank() == 1 ? 5 : 3);
    EXPECT_THAT(message_of<SetupError>([&] { Trainer(ddp(world)).fit(module, {.train = testing::tiny_loader(8, 4)}); }),
                HasSubstr("rank 0 has 'layer.weight' of shape [3, 4] and dtype Float, rank 1 has 'layer.weight' of "
                          "shape [5, 4] and dtype Float"));
  });
}

TEST(RanksThatFail, TooFewSamplesForEveryRank) {
  run_failing_ranks(3, [&](World& world) {
    EXPECT_THAT(message_of<SetupError>(
                    [&] { Trainer(ddp(world)).test(seeded<TinyModule>(), {.test = testing::tiny_loader(2, 1)}); }),
                HasSubstr("the test loader has too few samples for each of the 3 ranks"));
  });
}

TEST(RanksThatFail, OneDeviceIsNeededToTryThingsOut) {
  Trainer trainer(quiet({.strategy = "ddp", .devices = 2}));
  EXPECT_THAT(message_of<UsageError>(
                  [&] { trainer.find_learning_rate(make_module<TinyModule>(), {.train = testing::tiny_loader()}); }),
              HasSubstr("find_learning_rate tries on one device"));
}

}  // namespace
}  // namespace fulgur
