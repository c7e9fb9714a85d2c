// Runs that resume from a checkpoint, compared with the run that was never interrupted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/gradient_accumulation_scheduler.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/metrics/aggregation.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/lion.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/rmsprop.h"
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

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::TempDir;
using testing::tiny_dataset;
using testing::TinyModule;
using namespace std::chrono_literals;

constexpr int64_t kEpochs = 2;

// Has a learning rate that changes with every step, a metric of the epoch, and a buffer.
struct Net : TinyModule {
  torch::nn::BatchNorm1d norm{nullptr};
  Net() { norm = register_module("norm", torch::nn::BatchNorm1d(4)); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const Batch normed{{"x", norm->forward(batch["x"])}, {"y", batch["y"]}};
    const at::Tensor loss = TinyModule::training_step(normed, batch_idx);
    log("epoch_loss", loss, {.on_step = true, .on_epoch = true});
    return loss;
  }
  void validation_step(const Batch& batch, int64_t batch_idx) override {
    TinyModule::validation_step(batch, batch_idx);
    log("val_batch", batch["x"].sum(), {.on_step = true, .on_epoch = false});
  }
  Optimizers configure_optimizers() override {
    return {optim::AdamW(parameters(), {.lr = 1e-2}),
            {.scheduler = optim::CosineAnnealingLR::make({.T_max = 12}), .interval = "step"}};
  }
};

// Steps draw from the process's generator, so it runs on one rank.
struct NetWithDropout : Net {
  torch::nn::Dropout dropout{nullptr};
  NetWithDropout() { dropout = register_module("dropout", torch::nn::Dropout(0.3)); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return Net::training_step({{"x", dropout->forward(batch["x"])}, {"y", batch["y"]}}, batch_idx);
  }
};

// Halves the learning rate in every further epoch.
struct NetWithEpochs : Net {
  Optimizers configure_optimizers() override {
    return {optim::AdamW(parameters(), {.lr = 1e-2}),
            {.scheduler = optim::StepLR::make({.step_size = 1, .gamma = 0.5}), .interval = "epoch"}};
  }
};

struct NetWithSgd : Net {
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.05, .momentum = 0.9}); }
};
struct NetWithPlainSgd : Net {  // an optimizer whose state has no tensors
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.05}); }
};
struct NetWithTorchAdam : Net {
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(torch::optim::Adam(parameters(), torch::optim::AdamOptions(1e-2).amsgrad(true)));
  }
};
struct NetWithTorchSgd : Net {
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(torch::optim::SGD(parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)));
  }
};
struct NetWithLbfgs : Net {  // several evaluations of the loss in a step, and a history
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(
        torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(0.05).max_iter(3).history_size(4)));
  }
};
struct NetWithLamb : Net {
  Optimizers configure_optimizers() override { return optim::LAMB(parameters(), {.lr = 0.05}); }
};

// By an optimizer with momentum, so that a delayed update is predicted, and a schedule by step.
template <class O, auto kOptions>
struct NetBy : Net {
  Optimizers configure_optimizers() override {
    return {O(parameters(), kOptions()),
            {.scheduler = optim::StepLR::make({.step_size = 3, .gamma = 0.5}), .interval = "step"}};
  }
};
using NetByMomentum = NetBy<optim::SGD, [] { return optim::SGDOptions{.lr = 0.05, .momentum = 0.9}; }>;
using NetByNesterov =
    NetBy<optim::SGD, [] { return optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true}; }>;
using NetByAdam = NetBy<optim::Adam, [] { return optim::AdamOptions{.lr = 1e-2, .weight_decay = 0.1}; }>;
using NetByLion = NetBy<optim::Lion, [] { return optim::LionOptions{.lr = 0.01, .weight_decay = 0.1}; }>;
using NetByRMSprop =
    NetBy<optim::RMSprop, [] { return optim::RMSpropOptions{.lr = 0.01, .momentum = 0.9, .centered = true}; }>;

// Logs a Metric by reference.
struct NetWithMetric : Net {
  metrics::Mean mean;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor loss = Net::training_step(batch, batch_idx);
    mean.update(loss.detach(), static_cast<double>(batch.batch_size()));
    log("by_reference", mean);
    return loss;
  }
};

// Rank 1 logs the Metric in the first two batches of an epoch only, and none in a run that resumes later.
struct NetWithMetricOfSomeBatches : Net {
  metrics::Mean mean;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor loss = Net::training_step(batch, batch_idx);
    if (batch_idx >= 2 && global_rank() == 1) return loss;
    mean.update(loss.detach(), static_cast<double>(batch.batch_size()));
    log("by_reference", mean);
    return loss;
  }
};

// Halves the learning rate after the second epoch, as long as every epoch's metric covers all of its batches: in part
// of an epoch they have another mean.
struct NetWithPlateauOfTraining : NetWithMetric {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("mean_batch_idx", static_cast<double>(batch_idx), {.on_epoch = true});
    return NetWithMetric::training_step(batch, batch_idx);
  }
  Optimizers configure_optimizers() override {
    return {optim::AdamW(parameters(), {.lr = 1e-2}),
            {.scheduler = optim::ReduceLROnPlateau::make({.factor = 0.5, .patience = 0}), .monitor = "mean_batch_idx"}};
  }
};

// Two optimizers in manual optimisation, each with steps and a schedule of its own.
struct NetWithManualSteps : Net {
  NetWithManualSteps() { automatic_optimization = false; }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor loss = Net::training_step(batch, batch_idx);
    for (size_t i = 0; i < 2; ++i) optimizer(i).zero_grad();
    manual_backward(loss);
    optimizer(0).step();
    if (batch_idx % 2 == 0) optimizer(1).step();
    lr_scheduler().step();
    return loss;
  }
  Optimizers configure_optimizers() override {
    Optimizers both;
    both.add(optim::AdamW(hidden->parameters(), {.lr = 1e-2}),
             {.scheduler = optim::CosineAnnealingLR::make({.T_max = 12})});
    both.add(optim::SGD(out->parameters(), {.lr = 0.05, .momentum = 0.9}));
    return both;
  }
};

// Stands for data augmentation: every look at a sample draws from the process's generator.
class NoisyDataset final : public Dataset {
 public:
  explicit NoisyDataset(int64_t size) : samples_(tiny_dataset(size)) {}
  int64_t size() const override { return samples_->size(); }
  Batch get(int64_t index, Random&) const override {
    const Batch sample = samples_->get(index);
    return {{"x", sample["x"] + 0.1 * torch::randn_like(sample["x"])}, {"y", sample["y"]}};
  }

 private:
  std::shared_ptr<TensorDataset> samples_;
};

// Saves a checkpoint after every batch and epoch, and keeps what loggers get and the last learning rate.
class Recorder final : public Callback {
 public:
  explicit Recorder(fs::path folder) : folder_(std::move(folder)) {}
  std::vector<std::tuple<int64_t, std::string, double>> metrics;
  std::map<std::string, size_t> metrics_before;  // by checkpoint: the size of `metrics` when it was written
  double last_lr = -1;

  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t batch_idx) override {
    if (!folder_.empty()) trainer.save_checkpoint(folder_ / c10::str(trainer.state().epoch, "-", batch_idx));
  }
  void on_train_epoch_end(TrainerControl& trainer) override {
    if (!folder_.empty()) trainer.save_checkpoint(folder_ / c10::str(trainer.state().epoch, "-end"));
  }
  void on_metrics(TrainerControl&, const Metrics& values, int64_t step) override {
    for (const auto& [name, value] : values) metrics.emplace_back(step, name, value);
  }
  void on_checkpoint_saved(TrainerControl&, const fs::path& folder) override {
    metrics_before[folder.filename()] = metrics.size();
  }
  void on_fit_end(TrainerControl& trainer) override { last_lr = trainer.optimizers()[0].groups()[0].lr; }

 private:
  fs::path folder_;
};

// The results of a run on one rank.
struct Trail {
  NamedTensors weights;
  std::vector<double> losses;
  std::vector<std::tuple<int64_t, std::string, double>> metrics;
  std::map<std::string, size_t> metrics_before;  // by checkpoint
  RunState state;
  double last_lr;
};

struct RunKind {
  TrainerOptions options{};
  int64_t world_size = 1;
  std::function<std::shared_ptr<TinyModule>()> make = [] { return make_module<Net>(); };
  bool noisy_data = false;
  ModelCheckpoint::Options model_checkpoint{};  // each rank has its own; an empty dirpath: none
  bool shares_memory = true;                    // the ranks; false: they are connected by Gloo
};

// Runs on the ranks of the current World if there is one.
Trail fit(const RunKind& run, uint64_t seed, const fs::path& saved_in, const std::string& ckpt_path) {
  static std::mutex mutex;
  std::shared_ptr<TinyModule> module;
  {
    const std::lock_guard lock(mutex);
    seed_everything(seed);
    module = run.make();
  }
  TrainerOptions options = run.options;
  options.max_epochs = kEpochs;
  options.log_every_n_steps = 1;
  options.ckpt_path = ckpt_path;
  if (run.world_size > 1) options.devices = run.world_size;
  const bool has_model_checkpoint = !run.model_checkpoint.dirpath.empty();
  if (has_model_checkpoint) options.callbacks.push_back(ModelCheckpoint::make(run.model_checkpoint));
  const auto recorder = std::make_shared<Recorder>(saved_in);
  options.callbacks.push_back(recorder);
  options = testing::quiet(options);
  options.enable_checkpointing = has_model_checkpoint;
  Trainer trainer(options);
  const auto loader = [](int64_t size, bool shuffle) {
    return DataLoader::make(tiny_dataset(size), {.batch_size = 4, .shuffle = shuffle, .seed = 3});
  };
  const auto noisy =
      DataLoader::make(std::make_shared<NoisyDataset>(20), {.batch_size = 4, .shuffle = true, .seed = 3});
  trainer.fit(module, {.train = run.noisy_data ? noisy : loader(20 * run.world_size, true),
                       .val = loader(8 * run.world_size, false)});
  Trail trail{
      {}, module->train_losses, recorder->metrics, recorder->metrics_before, trainer.state(), recorder->last_lr};
  for (const auto& item : module->named_parameters()) trail.weights.emplace_back(item.key(), item.value().detach());
  for (const auto& item : module->named_buffers()) trail.weights.emplace_back(item.key(), item.value().detach());
  return trail;
}

// Returns a trail for each rank.
std::vector<Trail> fit_all(const RunKind& run, uint64_t seed, const fs::path& saved_in, const std::string& ckpt_path) {
  std::vector<Trail> trails(static_cast<size_t>(run.world_size));
  if (run.world_size == 1) {
    trails[0] = fit(run, seed, saved_in, ckpt_path);
    return trails;
  }
  run_ranks(run.world_size, testing::connected(run.shares_memory),
            [&](World& world) { trails[static_cast<size_t>(world.rank())] = fit(run, seed, saved_in, ckpt_path); });
  return trails;
}

std::vector<fs::path> checkpoints_in(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) found.push_back(entry.path());
  std::ranges::sort(found);
  return found;
}

template <class T>
bool ends_with(const std::vector<T>& whole, const std::vector<T>& end) {
  return end.size() <= whole.size() && std::equal(end.rbegin(), end.rend(), whole.rbegin());
}

// All but the first `metrics_before` metrics of the whole run are sent by the run that resumed.
void expect_same_end(const Trail& whole, const Trail& resumed, size_t metrics_before) {
  EXPECT_TRUE(ends_with(whole.losses, resumed.losses));
  EXPECT_EQ(resumed.metrics.size(), whole.metrics.size() - metrics_before);
  EXPECT_TRUE(ends_with(whole.metrics, resumed.metrics));
  EXPECT_EQ(resumed.state.global_step, whole.state.global_step);
  EXPECT_EQ(resumed.state.batches_that_stepped, whole.state.batches_that_stepped);
  EXPECT_EQ(resumed.last_lr, whole.last_lr);
  for (size_t i = 0; i < whole.weights.size(); ++i) {
    EXPECT_TRUE(resumed.weights[i].second.equal(whole.weights[i].second)) << whole.weights[i].first;
  }
}

// Resumes from every checkpoint of a run, in a process that begins with other weights.
void expect_exact_resume(const RunKind& run) {
  const TempDir dir;
  const std::vector<Trail> whole = fit_all(run, 1, dir.path(), "");
  std::set<size_t> lengths;
  for (const fs::path& checkpoint : checkpoints_in(dir.path())) {
    SCOPED_TRACE(checkpoint.filename().string());
    const std::vector<Trail> resumed = fit_all(run, 2, "", checkpoint);
    for (size_t rank = 0; rank < whole.size(); ++rank) {
      SCOPED_TRACE(rank);
      expect_same_end(whole[rank], resumed[rank], whole[rank].metrics_before.at(checkpoint.filename()));
    }
    lengths.insert(resumed[0].losses.size());
  }
  EXPECT_GE(lengths.size(), 5U);  // the runs resumed at different steps
  EXPECT_EQ(*lengths.begin(), 0U);
}

TEST(Resume, IsExactFromEveryStepOnOneDevice) {
  for (const char* precision : {"32", "64", "bf16-true", "16-mixed", "16-true"}) {
    SCOPED_TRACE(precision);
    expect_exact_resume({.options = {.precision = precision}, .make = [] { return make_module<NetWithDropout>(); }});
  }
}

// Saves before the first step.
class SavesAtStart final : public Callback {
 public:
  explicit SavesAtStart(fs::path folder) : folder_(std::move(folder)) {}
  void on_fit_start(TrainerControl& trainer) override { trainer.save_checkpoint(folder_ / "fit_start"); }
  void on_train_start(TrainerControl& trainer) override { trainer.save_checkpoint(folder_ / "train_start"); }

 private:
  fs::path folder_;
};

// A signal may come while a resumed run is still being set up.
TEST(Resume, IsExactFromWhatAResumedRunSavesBeforeItsFirstStep) {
  const RunKind run{.make = [] { return make_module<NetWithDropout>(); }};
  const TempDir dir;
  const Trail whole = fit(run, 1, dir.path() / "first", "");
  for (const char* checkpoint : {"0-2", "0-end"}) {
    const fs::path second = dir.path() / c10::str("from ", checkpoint);
    RunKind saving = run;
    saving.options.callbacks = {std::make_shared<SavesAtStart>(second)};
    fit(saving, 2, "", dir.path() / "first" / checkpoint);
    for (const char* hook : {"fit_start", "train_start"}) {
      SCOPED_TRACE(c10::str(checkpoint, ", ", hook));
      const Trail resumed = fit(run, 3, "", second / hook);
      EXPECT_EQ(resumed.losses.size(), std::string_view(checkpoint) == "0-2" ? 7U : 5U);
      expect_same_end(whole, resumed, whole.metrics_before.at(checkpoint));
    }
  }
}

TEST(Resume, IsExactWithAccumulationClippingAndValidationInTheMiddle) {
  expect_exact_resume(
      {.options = {.val_check_interval = Batches(2), .accumulate_grad_batches = 2, .gradient_clip_val = 0.1}});
}

// In the first step of a run nobody has asked for a norm while backward runs.
TEST(Resume, IsExactWithTheNormOfSeveralBuckets) {
  for (const StrategyChoice& strategy :
       {StrategyChoice("zero_offload"), StrategyChoice(DelayedUpdate{.base = "single_device", .warmup_steps = 0})}) {
    expect_exact_resume({.options = {.strategy = strategy, .precision = "64", .gradient_clip_val = 0.1}});
  }
}

TEST(Resume, IsExactWithEveryKindOfOptimizer) {
  expect_exact_resume({.make = [] { return make_module<NetWithSgd>(); }});
  expect_exact_resume({.make = [] { return make_module<NetWithPlainSgd>(); }});
  expect_exact_resume({.make = [] { return make_module<NetWithLamb>(); }});
  expect_exact_resume({.make = [] { return make_module<NetWithTorchAdam>(); }});
  expect_exact_resume({.make = [] { return make_module<NetWithLbfgs>(); }});
  const TrainerOptions clipped{.precision = "bf16-true", .gradient_clip_val = 0.1};
  for (const int64_t world_size : {1, 2}) {  // with gradients, and so a state, of 16 bits or of 32
    for (const TrainerOptions& options : {TrainerOptions{.precision = "bf16-true"}, clipped}) {
      SCOPED_TRACE(c10::str(world_size, " ranks, clipped to ", options.gradient_clip_val));
      expect_exact_resume({options, world_size, [] { return make_module<NetWithTorchSgd>(); }});
      expect_exact_resume({options, world_size, [] { return make_module<NetWithLbfgs>(); }});
    }
  }
}

// The checkpoint lists ranges of an optimizer state that has no tensors.
TEST(Resume, AnythingCanBeginWithTheCheckpointOfAPlainSgd) {
  RunKind run{.make = [] { return make_module<NetWithPlainSgd>(); }};
  const TempDir dir;
  const Trail whole = fit(run, 1, dir.path(), "");
  const auto last_loss = std::ranges::find(whole.metrics.rbegin(), whole.metrics.rend(), "val_loss",
                                           [](const auto& metric) { return std::get<1>(metric); });
  Trainer trainer(testing::quiet());
  const auto val = DataLoader::make(tiny_dataset(8), {.batch_size = 4});
  const Metrics validated = trainer.validate(make_module<NetWithPlainSgd>(), {.val = val}, dir.path() / "1-end");
  EXPECT_NEAR(validated.at("val_loss"), std::get<2>(*last_loss), 1e-6);
  run.options = {.max_steps = 1, .ckpt_weights_only = true};
  EXPECT_EQ(fit(run, 2, "", dir.path() / "1-end").state.global_step, 1);
}

TEST(Resume, IsExactWithAScheduleOfAccumulation) {
  using Schedule = GradientAccumulationScheduler::Schedule;
  for (const Schedule& schedule : {Schedule{{0, 2}, {1, 3}}, Schedule{{1, 2}}}) {
    SCOPED_TRACE(schedule.size());
    expect_exact_resume({.options = {.callbacks = {GradientAccumulationScheduler::make(schedule)}}});
  }
}

TEST(Resume, KeepsTheAccumulationThatACallbackHasSetUnlessTheOptionsChange) {
  const TempDir dir;
  RunKind first{.options = {.max_steps = 1}};
  first.options.callbacks = {GradientAccumulationScheduler::make({{0, 5}})};
  fit(first, 1, dir.path(), "");  // the five batches of the first epoch
  for (const auto& [planned, global_step] : {std::pair(1, 2), std::pair(2, 4)}) {
    ::testing::internal::CaptureStderr();
    const Trail resumed = fit({.options = {.accumulate_grad_batches = planned}}, 2, "", dir.path() / "0-end");
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(resumed.state.global_step, global_step);
    EXPECT_EQ(told.find("begins with the 5 of the checkpoint") != told.npos, planned == 1) << told;
  }
}

TEST(Resume, IsExactInManualOptimisationWithSeveralOptimizers) {
  expect_exact_resume({.make = [] { return make_module<NetWithManualSteps>(); }});
}

TEST(Resume, IsExactWithAMetricThatIsLoggedByReference) {
  for (const int64_t world_size : {1, 2}) {
    SCOPED_TRACE(world_size);
    expect_exact_resume({.world_size = world_size, .make = [] { return make_module<NetWithMetric>(); }});
  }
  expect_exact_resume({.world_size = 2, .make = [] { return make_module<NetWithMetricOfSomeBatches>(); }});
}

// Trains more and more parameters, which come into buckets of their own, and in the end one less.
struct NetThatThaws : Net {
  at::Tensor extra = register_parameter("extra", torch::ones({4000}));
  NetThatThaws() { freeze(0); }
  void freeze(int64_t batch) {
    for (const at::Tensor& param : hidden->parameters()) param.set_requires_grad(batch >= 2);
    extra.set_requires_grad(batch >= 4);
    out->bias.set_requires_grad(batch < 6);
  }
  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    freeze(5 * current_epoch() + batch_idx);
    return BatchAction::run;
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor scale = torch::linspace(-1, 1, 4000) * static_cast<double>(global_rank() + batch_idx + 1);
    return Net::training_step(batch, batch_idx) + (extra * scale).sin().square().mean();
  }
};

// The checkpoint at the end of the epoch has trainable parameters that no step has put into a bucket yet.
struct NetThatThawsAtTheEnd : NetThatThaws {
  NetThatThawsAtTheEnd() { freeze(0); }
  BatchAction on_train_batch_start(const Batch&, int64_t) override { return BatchAction::run; }
  void on_train_epoch_end() override { freeze(4); }
};

// Over Gloo the last bits of sums depend on where buckets end.
TEST(Resume, IsExactWithLayersThatThaw) {
  for (const char* strategy : {"ddp", "ddp_sharded"}) {
    SCOPED_TRACE(strategy);
    RunKind run{.options = {.strategy = strategy}, .world_size = 3, .make = [] { return make_module<NetThatThaws>(); }};
    run.shares_memory = false;
    expect_exact_resume(run);
    run.make = [] { return make_module<NetThatThawsAtTheEnd>(); };
    expect_exact_resume(run);
  }
}

TEST(Resume, SaysWhatIsFrozenAsInTheCheckpoint) {
  struct Backbone : Net {
    explicit Backbone(bool trains) { hidden->weight.set_requires_grad(trains); }
  };
  const TempDir dir;
  const auto saves =
      testing::at_batch_end([&](TrainerControl& control) { control.save_checkpoint(dir.path() / "saved"); });
  Trainer(testing::quiet({.max_steps = 1, .callbacks = {saves}}))
      .fit(make_module<Backbone>(false), {.train = testing::tiny_loader()});
  ::testing::internal::CaptureStderr();
  const auto module = make_module<Backbone>(true);
  Trainer(testing::quiet({.max_steps = 2, .ckpt_path = dir.path() / "saved"}))
      .fit(module, {.train = testing::tiny_loader()});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("Backbone has them: 'hidden.weight' is frozen"));
  EXPECT_FALSE(module->hidden->weight.requires_grad());
}

// One tensor that two modules have as a buffer.
TEST(Resume, ACheckpointHasEveryNameOfASharedBuffer) {
  struct Shares : Net {
    at::Tensor table = register_buffer("table", torch::ones({3}));
    Shares() { hidden->register_buffer("table", table); }
  };
  const TempDir dir;
  Trainer trainer(testing::quiet({.max_steps = 1}));
  trainer.fit(make_module<Shares>(), {.train = testing::tiny_loader()});
  trainer.save_checkpoint(dir.path() / "saved");
  const CheckpointReader saved(dir.path() / "saved");
  const auto& entries = saved.manifest().parameters;
  EXPECT_EQ(
      std::ranges::count_if(entries, [](const auto& e) { return e.name == "hidden.table" && e.alias_of == "table"; }),
      1);
}

// No checkpoint could be loaded into such a buffer.
TEST(Resume, AnExpandedBufferIsRefusedBeforeTraining) {
  struct Expanded : Net {
    at::Tensor mask = register_buffer("mask", torch::ones({1}).expand({4}));
  };
  EXPECT_THAT(message_of<SetupError>(
                  [] { Trainer(testing::quiet()).fit(make_module<Expanded>(), {.train = testing::tiny_loader()}); }),
              HasSubstr("elements of the buffer 'mask' share memory"));
  const auto module = make_module<Expanded>();
  EXPECT_THAT(message_of<CheckpointError>([&] { load_weights(*module, {{"mask", torch::ones({4})}}, "saved", false); }),
              HasSubstr("saved: elements of 'mask' share memory"));
}

// A path is bytes, and part of a callback's key in the checkpoint.
TEST(Resume, AFolderNeedNotBeUtf8) {
  const TempDir dir;
  TrainerOptions options = testing::quiet({.max_steps = 1});
  options.enable_checkpointing = true;
  options.callbacks = {ModelCheckpoint::make({.dirpath = dir.path() / "caf\xe9"})};
  Trainer(options).fit(make_module<Net>(), {.train = testing::tiny_loader()});
  options.max_steps = 2;
  options.ckpt_path = dir.path() / "caf\xe9" / "last";
  Trainer trainer(options);
  trainer.fit(make_module<Net>(), {.train = testing::tiny_loader()});
  EXPECT_EQ(trainer.state().global_step, 2);
}

TEST(Resume, IsExactWithFewerBatchesThanTheLoaderHas) {
  expect_exact_resume({.options = {.limit_train_batches = Batches(3), .limit_val_batches = Batches(1)}});
  expect_exact_resume({.options = {.overfit_batches = Batches(3)}});
}

TEST(Resume, IsExactWithLoadersThatAreMadeAnew) {
  expect_exact_resume({.options = {.reload_dataloaders_every_n_epochs = 1}, .noisy_data = true});
}

TEST(Resume, IsExactWithDataThatDrawsRandomNumbers) { expect_exact_resume({.noisy_data = true}); }

// Validates other weights than it trains, draws random numbers in validation, and logs in two hooks of training.
struct NetWithOtherWeights : NetWithDropout {
  void scale(double factor) {
    const c10::NoGradGuard no_grad;
    out->weight.mul_(factor);
  }
  void on_validation_start() override { scale(2); }
  void on_validation_end() override { scale(0.5); }
  void validation_step(const Batch& batch, int64_t batch_idx) override {
    Net::validation_step(batch, batch_idx);
    log("drawn", torch::rand({}));
  }
  void on_train_batch_end(const at::Tensor& loss, const Batch&, int64_t) override {
    log("loss_again", loss, {.on_step = true, .on_epoch = true});
  }
};

// A learning rate that the validations lower.
struct NetWithPlateau : Net {
  Optimizers configure_optimizers() override {
    return {optim::AdamW(parameters(), {.lr = 1e-2}),
            {.scheduler = optim::ReduceLROnPlateau::make({.patience = 0, .threshold = 0.5}),
             .interval = "step",
             .frequency = 2,
             .monitor = "val_loss",
             .strict = false}};
  }
};

// Counts validations and their batches, and sends SIGTERM at the first batch of one validation.
class WatchesValidations final : public Callback {
 public:
  explicit WatchesValidations(int64_t terminated) : terminated_(terminated) {}
  int64_t batches = 0, passes = 0;

  bool runs_on_every_rank() const override { return false; }
  void on_validation_batch_end(TrainerControl& trainer, const Batch&, int64_t batch_idx) override {
    if (trainer.state().sanity_checking) return;
    ++batches;
    if (batch_idx == 0 && passes == terminated_) std::raise(SIGTERM);
  }
  void on_validation_end(TrainerControl& trainer) override {
    if (!trainer.state().sanity_checking) ++passes;
  }

 private:
  int64_t terminated_;  // counted from 0; negative: never
};

void expect_interrupted(RunKind run, const fs::path& checkpoints, int64_t validation, const std::string& ckpt_path) {
  const auto watches = std::make_shared<WatchesValidations>(validation);
  run.model_checkpoint = {.dirpath = checkpoints, .save_top_k = 0};
  run.options.callbacks = {watches};
  EXPECT_THROW(fit_all(run, 1, "", ckpt_path), InterruptedError);
  EXPECT_EQ(watches->batches, 2 * validation + 1);
  EXPECT_EQ(watches->passes, validation + 1);
}

// How many metrics a run sends before a validation, counted from 0, of two batches.
size_t metrics_before_validation(const Trail& trail, int64_t validation) {
  int64_t batches = 2 * validation;
  const auto is_first = [&](const auto& metric) { return std::get<1>(metric) == "val_batch" && batches-- == 0; };
  return static_cast<size_t>(std::ranges::find_if(trail.metrics, is_first) - trail.metrics.begin());
}

// Each validation of a run is interrupted after the first of its two batches, and again after it has started over.
void expect_exact_resume_of_validations(const RunKind& run, int64_t num_validations) {
  const std::vector<Trail> whole = fit_all(run, 1, "", "");
  for (int64_t validation = 0; validation < num_validations; ++validation) {
    SCOPED_TRACE(validation);
    const TempDir dir;
    expect_interrupted(run, dir.path(), validation, "");
    expect_interrupted(run, dir.path(), 0, dir.path() / "last");
    const auto watches = std::make_shared<WatchesValidations>(-1);
    RunKind resumed = run;
    resumed.options.callbacks = {watches};
    const std::vector<Trail> trails = fit_all(resumed, 2, "", dir.path() / "last");
    for (size_t rank = 0; rank < whole.size(); ++rank) {
      expect_same_end(whole[rank], trails[rank], metrics_before_validation(whole[rank], validation));
    }
    EXPECT_EQ(watches->passes, num_validations - validation);
  }
}

TEST(Resume, BeginsAnewTheValidationThatASignalCutShort) {
  expect_exact_resume_of_validations({.make = [] { return make_module<NetWithOtherWeights>(); }}, 2);
  const TrainerOptions often{.max_steps = 9, .val_check_interval = Batches(2)};  // the fourth one is after step 9
  expect_exact_resume_of_validations({often, 1, [] { return make_module<NetWithOtherWeights>(); }}, 4);
  expect_exact_resume_of_validations({often, 1, [] { return make_module<NetWithPlateau>(); }}, 4);
  expect_exact_resume_of_validations({often, 2}, 4);
  TrainerOptions late = often, accumulating = often;
  late.strategy = DelayedUpdate{.base = "single_device", .warmup_steps = 0};
  expect_exact_resume_of_validations({late}, 4);
  accumulating.accumulate_grad_batches = 2;
  accumulating.max_steps = -1;
  expect_exact_resume_of_validations({accumulating}, 4);
}

// The last batch of the epoch comes before the validation, so that nobody logs the Metric after it has started over.
TEST(Resume, TheMetricOfAnEpochSurvivesItsLastValidation) {
  expect_exact_resume_of_validations({.make = [] { return make_module<NetWithMetric>(); }}, 2);
  expect_exact_resume_of_validations({.world_size = 2, .make = [] { return make_module<NetWithMetric>(); }}, 2);
}

// The ranks do not consult each other before a batch that only one of them may have.
TEST(Resume, RanksWhoseLoadersKnowNoLengthValidateToTheEnd) {
  std::array<size_t, 2> num_batches{};
  EXPECT_THROW(run_ranks(2,
                         [&](World& world) {
                           struct Counts : TinyModule {
                             size_t batches = 0;
                             void validation_step(const Batch&, int64_t) override {
                               if (batches++ == 0) std::raise(SIGTERM);
                             }
                           };
                           const bool is_first = world.rank() == 0;
                           const auto module = make_module<Counts>();
                           TrainerOptions options = testing::quiet({.devices = 2, .num_sanity_val_steps = 0});
                           options.limit_val_batches = Batches(10);
                           options.use_distributed_sampler = false;
                           const auto val = testing::UnsizedLoader::make(testing::tiny_loader(is_first ? 64 : 16, 8));
                           try {
                             Trainer(options).fit(module, {.train = testing::tiny_loader(), .val = val});
                           } catch (const InterruptedError&) {
                             num_batches[is_first ? 0 : 1] = module->batches;
                             throw;
                           }
                         }),
               InterruptedError);
  EXPECT_EQ(num_batches[0], 8U);
  EXPECT_EQ(num_batches[1], 2U);
}

// The schedule moves once the epoch is complete, and no earlier.
TEST(Resume, GoesOnInAnEpochThatMaxStepsHasCut) {
  const auto make = [] { return make_module<NetWithEpochs>(); };
  const TempDir dir;
  const Trail whole = fit({.make = make}, 1, "", "");
  fit({.options = {.max_steps = 3}, .make = make}, 1, dir.path(), "");
  const Trail resumed = fit({.make = make}, 2, "", dir.path() / "0-end");
  EXPECT_EQ(resumed.losses.size(), 7U);
  EXPECT_TRUE(ends_with(whole.losses, resumed.losses));
}

// 36 of 40 samples are seen, in batches of 4; of the rest no batch of 8 can be made. The epoch ends as if by its last
// batch.
TEST(Resume, EndsAnEpochOfWhichNoWholeBatchIsLeft) {
  const TempDir dir;
  const auto run_epoch = [](int64_t batch_size, const fs::path& saved_in, const std::string& ckpt_path) {
    const auto recorder = std::make_shared<Recorder>(saved_in);
    const auto watches = std::make_shared<WatchesValidations>(-1);
    Trainer trainer(testing::quiet({.ckpt_path = ckpt_path, .callbacks = {recorder, watches}}));
    const auto module = make_module<NetWithEpochs>();
    trainer.fit(module, {.train = DataLoader::make(tiny_dataset(), {.batch_size = batch_size, .drop_last = true}),
                         .val = {testing::tiny_loader()}});
    EXPECT_EQ(recorder->last_lr, 0.5e-2);
    return std::pair(module->train_losses.size(), watches->passes);
  };
  EXPECT_EQ(run_epoch(4, dir.path(), ""), std::pair(size_t{10}, int64_t{1}));
  EXPECT_EQ(run_epoch(8, "", dir.path() / "0-8"), std::pair(size_t{0}, int64_t{1}));
  EXPECT_EQ(run_epoch(8, "", dir.path() / "0-9"), std::pair(size_t{0}, int64_t{0}));  // the first run has validated
}

// Keeps the number of steps that schedules are made for.
struct CountsSteps : TinyModule {
  int64_t num_steps = 0;
  Optimizers configure_optimizers() override {
    num_steps = estimated_stepping_batches();
    return TinyModule::configure_optimizers();
  }
};

// Keeps the epoch and the step in which its loader is requested.
struct WatchedData final : DataModule {
  WatchedData(std::shared_ptr<TinyModule> given, int64_t size) : module(std::move(given)), batch_size(size) {}
  std::shared_ptr<TinyModule> module;
  int64_t batch_size;
  std::vector<std::pair<int64_t, int64_t>> requests;
  std::shared_ptr<Loader> train_dataloader() override {
    requests.emplace_back(module->current_epoch(), module->global_step());
    return testing::tiny_loader(40, batch_size);
  }
};

// 5 batches of 8 samples make an epoch, or 3 larger ones. After 7 steps 2 of the larger ones are left of the epoch.
TEST(Resume, LoadersAndSchedulesAreMadeForThePlaceWhereItResumes) {
  const TempDir dir;
  const auto run = [&](int64_t batch_size, const fs::path& saved_in, const std::string& ckpt_path,
                       std::pair<int64_t, int64_t> request, int64_t num_steps) {
    SCOPED_TRACE(c10::str(ckpt_path, ", batches of ", batch_size));
    const auto module = make_module<CountsSteps>();
    WatchedData data(module, batch_size);
    const auto saves = testing::at_batch_end([&](TrainerControl& control) {
      control.save_checkpoint(saved_in / std::to_string(control.state().global_step));
    });
    Trainer trainer(testing::quiet({.max_epochs = 3, .ckpt_path = ckpt_path, .callbacks = {saves}}));
    trainer.fit(module, data);
    EXPECT_EQ(data.requests, std::vector{request});
    EXPECT_EQ(module->num_steps, num_steps);
    EXPECT_EQ(trainer.state().estimated_stepping_batches, num_steps);
    EXPECT_EQ(trainer.state().global_step, num_steps);
  };
  run(8, dir.path() / "a", "", {0, 0}, 15);
  run(8, dir.path() / "b", dir.path() / "a/7", {1, 7}, 15);
  run(16, dir.path() / "c", dir.path() / "a/7", {1, 7}, 12);
  run(16, dir.path() / "d", dir.path() / "c/8", {1, 8}, 12);
  run(16, dir.path() / "e", dir.path() / "c/10", {2, 10}, 12);
}

// 5 batches are an epoch. From step 5 on, 2 epochs of 2 steps are left with windows of 3 batches.
TEST(Resume, StepsAreCountedWithTheAccumulationThatItGoesOnWith) {
  const TempDir dir;
  const auto saves = testing::at_batch_end([&](TrainerControl& control) {
    if (control.state().global_step == 5) control.save_checkpoint(dir.path() / "saved");
  });
  Trainer(testing::quiet({.max_epochs = 3, .callbacks = {saves}}))
      .fit(make_module<CountsSteps>(), {.train = testing::tiny_loader(40, 8)});
  const auto module = make_module<CountsSteps>();
  Trainer trainer(testing::quiet({.max_epochs = 3, .accumulate_grad_batches = 3, .ckpt_path = dir.path() / "saved"}));
  trainer.fit(module, {.train = testing::tiny_loader(40, 8)});
  EXPECT_EQ(module->num_steps, 9);
  EXPECT_EQ(trainer.state().global_step, 9);
}

// A callback's accumulation begins with the next epoch, also in a run that resumes in this one.
TEST(Resume, AnEpochKeepsTheAccumulationThatItBeganWith) {
  const auto sets = [] {
    return testing::at_batch_end([](TrainerControl& control) {
      if (control.state().batch_idx == 1) control.set_accumulation(2);
    });
  };
  expect_exact_resume({.options = {.callbacks = {sets()}}});
}

// A word that a Module keeps beside its weights.
struct NetWithWord : Net {
  std::string word = "untrained";
  void on_train_start() override { word = "trained"; }
  void on_save_checkpoint(State& state) override { state.set("word", word); }
  void on_load_checkpoint(const State& state) override { word = state.get<std::string>("word"); }
};

TEST(Resume, EveryEntryPointGetsWhatTheModuleHasSaved) {
  const TempDir dir;
  const auto loader_of = [] { return testing::tiny_loader(16, 8); };
  const auto saves = testing::at_batch_end([&](TrainerControl& control) {
    control.save_checkpoint(dir.path() / std::to_string(control.state().batch_idx),
                            {.weights_only = control.state().batch_idx == 1});
  });
  Trainer trainer(testing::quiet({.callbacks = {saves}}));
  trainer.fit(make_module<NetWithWord>(), {.train = loader_of()});
  trainer.save_checkpoint(dir.path() / "after");
  for (const char* name : {"0", "1", "after"}) {
    const auto module = make_module<NetWithWord>();
    Trainer(testing::quiet()).validate(module, {.val = {loader_of()}}, dir.path() / name);
    EXPECT_EQ(module->word, "trained") << name;
  }
}

// Saves after the last step, when the epoch's metrics are reduced.
class SavesAtEnd final : public Callback {
 public:
  explicit SavesAtEnd(fs::path folder) : folder_(std::move(folder)) {}
  void on_train_end(TrainerControl& trainer) override { trainer.save_checkpoint(folder_ / "train-end"); }

 private:
  fs::path folder_;
};

// Drops validation metrics: the run that is cut validates at other times than the whole run.
Trail of_training(Trail trail) {
  std::erase_if(trail.metrics, [](const auto& metric) { return std::get<1>(metric).starts_with("val"); });
  return trail;
}

// The metrics are complete whatever ended the epoch, and whenever the checkpoint was written.
TEST(Resume, MetricsOfAnEpochThatWasCutCoverAllOfIt) {
  const auto make = [] { return make_module<NetWithPlateauOfTraining>(); };
  const Trail whole = of_training(fit({.make = make}, 1, "", ""));
  EXPECT_EQ(whole.last_lr, 0.5e-2);
  for (const bool by_request : {false, true}) {
    const TempDir dir;
    RunKind cut{.options = {.max_steps = by_request ? -1 : 3}, .make = make};
    cut.options.callbacks = {std::make_shared<SavesAtEnd>(dir.path())};
    if (by_request) cut.options.callbacks.push_back(testing::stop_at_batch(3));
    fit(cut, 1, dir.path(), "");
    for (const char* checkpoint : {"0-2", "0-end", "train-end"}) {
      SCOPED_TRACE(c10::str(by_request ? "request_stop, " : "max_steps, ", checkpoint));
      const Trail resumed = of_training(fit({.make = make}, 2, "", dir.path() / checkpoint));
      EXPECT_EQ(resumed.losses.size(), 7U);
      const auto is_before = [](const auto& metric) { return std::get<0>(metric) < 3; };
      expect_same_end(whole, resumed, static_cast<size_t>(std::ranges::count_if(whole.metrics, is_before)));
    }
  }
}

// Replaces the value of `name` in state.json by `value`, keeping the file's size.
void overwrite(const fs::path& checkpoint, const std::string& name, const std::string& value) {
  const fs::path file = checkpoint / "state.json";
  std::string text = testing::read_file(file);
  const size_t begin = text.find("\"" + name + "\":") + name.size() + 3;
  const size_t end = text.find_first_of(",}\n", begin);
  ASSERT_LE(begin + value.size(), end);
  text.replace(begin, end - begin, std::string(end - begin - value.size(), ' ') + value);
  std::ofstream(file) << text;
}

TEST(Resume, RefusesCountsAndTimesThatNoRunHas) {
  for (const auto& [name, value] : {std::pair("elapsed_s", "1e300"), std::pair("elapsed_s", "-2.5"),
                                    std::pair("global_step", "-3"), std::pair("batches_of_epoch", "-4")}) {
    SCOPED_TRACE(c10::str(name, " ", value));
    const TempDir dir;
    fit({.options = {.max_steps = 3}}, 1, dir.path(), "");
    const fs::path checkpoint = dir.path() / "0-end";
    overwrite(checkpoint, c10::str("loops/", name), value);
    const TrainerOptions unchecked{.ckpt_verify = false};
    EXPECT_THAT(message_of<CheckpointError>([&] { fit({.options = unchecked}, 2, "", checkpoint); }),
                AllOf(HasSubstr(name), HasSubstr(checkpoint.string())));
  }
}

TEST(Resume, MaxTimeCountsTheTimeBeforeTheCheckpoint) {
  const TempDir dir;
  fit({.options = {.max_steps = 3}}, 1, dir.path(), "");
  const fs::path checkpoint = dir.path() / "0-end";
  overwrite(checkpoint, "loops/elapsed_s", "4e3");
  for (const auto& [max_time, global_step] : {std::pair(1h, 3), {2h, 10}}) {
    const TrainerOptions options{.max_time = max_time, .ckpt_verify = false};
    EXPECT_EQ(fit({.options = options}, 2, "", checkpoint).state.global_step, global_step);
  }
}

TEST(Resume, IsExactWithTwoReplicas) { expect_exact_resume({.options = {.strategy = "dp", .devices = 2}}); }

TEST(Resume, IsExactWithStateOnTheHost) {
  expect_exact_resume({.options = {.strategy = "zero_offload"}});
  expect_exact_resume({.options = {.strategy = "zero_offload", .precision = "bf16-true"}});
}

TEST(Resume, IsExactWithAnUpdateUnderWay) {
  for (const char* precision : {"32", "bf16-true"}) {
    SCOPED_TRACE(precision);
    const DelayedUpdate late{.base = "zero_offload", .warmup_steps = 2};
    expect_exact_resume({.options = {.strategy = late, .precision = precision}});
  }
}

TEST(Resume, IsExactWithAnUpdateInProgressByEveryPredictionAndRule) {
  using Make = std::function<std::shared_ptr<TinyModule>()>;
  const std::vector<Make> nets{[] { return make_module<Net>(); },           [] { return make_module<NetByAdam>(); },
                               [] { return make_module<NetByMomentum>(); }, [] { return make_module<NetByNesterov>(); },
                               [] { return make_module<NetByLion>(); },     [] { return make_module<NetByRMSprop>(); }};
  const std::vector<const char*> by_gradient{"gradient"}, by_all{"gradient", "moments", "repeat", "none"};
  for (size_t i = 0; i < nets.size(); ++i) {
    for (const char* predict : i == 0 ? by_all : by_gradient) {
      for (const char* precision : {"32", "bf16-true"}) {
        SCOPED_TRACE(c10::str("net ", i, ", ", predict, ", ", precision));
        const DelayedUpdate late{.base = "single_device", .predict = predict, .warmup_steps = 2};
        expect_exact_resume({.options = {.strategy = late, .precision = precision}, .make = nets[i]});
      }
    }
  }
}

// Over ddp every rank updates all parameters, and saves its part of them.
TEST(Resume, IsExactWithAnUpdateInProgressOnSeveralRanks) {
  for (const char* base : {"ddp", "ddp_sharded", "zero_offload"}) {
    for (const char* predict : {"gradient", "repeat", "none"}) {
      for (const char* precision : {"32", "bf16-true"}) {
        SCOPED_TRACE(c10::str(base, ", ", predict, ", ", precision));
        const DelayedUpdate late{.base = base, .predict = predict, .warmup_steps = 2};
        expect_exact_resume({.options = {.strategy = late, .precision = precision}, .world_size = 2});
      }
    }
  }
}

TEST(Resume, IsExactWithAnUpdateInProgressOnSeveralRanksByEveryRule) {
  using Make = std::function<std::shared_ptr<TinyModule>()>;
  const std::vector<Make> nets{[] { return make_module<NetByAdam>(); }, [] { return make_module<NetByNesterov>(); },
                               [] { return make_module<NetByLion>(); }, [] { return make_module<NetByRMSprop>(); }};
  const DelayedUpdate late{.base = "ddp_sharded", .predict = "gradient", .warmup_steps = 2};
  for (size_t i = 0; i < nets.size(); ++i) {
    for (const char* precision : {"32", "bf16-true"}) {
      SCOPED_TRACE(c10::str("net ", i, ", ", precision));
      expect_exact_resume({.options = {.strategy = late, .precision = precision}, .world_size = 2, .make = nets[i]});
    }
  }
}

TEST(Resume, IsExactOnSeveralRanks) {
  const std::vector<StrategyChoice> strategies{"ddp", "ddp_sharded", "zero_offload",
                                               DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 2}};
  for (const StrategyChoice& strategy : strategies) {
    SCOPED_TRACE(strategy.name());
    expect_exact_resume({.options = {.strategy = strategy, .accumulate_grad_batches = 2}, .world_size = 2});
  }
}

// All parameters and optimizer state of a checkpoint, whichever rank wrote which part.
std::map<std::string, at::Tensor> contents_of(const fs::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  std::map<std::string, at::Tensor> contents;
  for (const auto& [name, tensor] : reader.weights()) contents[name] = tensor;
  for (const auto& range : reader.manifest().ranges) {
    const int64_t size = contents.at(range.parameter).numel();
    for (const auto& [name, tensor] : reader.read(range.parameter, 0, size)) {
      contents[range.parameter + ":" + name] = tensor;
    }
  }
  return contents;
}

// Saves the state at the start of a run, and keeps the samples that this rank sees in its first epoch.
class FirstEpoch final : public Callback {
 public:
  FirstEpoch(fs::path folder, int64_t ends_after) : folder_(std::move(folder)), ends_after_(ends_after) {}
  std::multiset<float> samples;

  void on_train_start(TrainerControl& trainer) override { trainer.save_checkpoint(folder_ / "begin"); }
  BatchAction on_train_batch_start(TrainerControl& trainer, const Batch& batch, int64_t) override {
    epoch_ = epoch_.value_or(trainer.state().epoch);
    if (has_ended_ || epoch_ != trainer.state().epoch) return BatchAction::run;
    const at::Tensor first = batch["x"].select(1, 0).to(at::kFloat).contiguous();
    samples.insert(first.const_data_ptr<float>(), first.const_data_ptr<float>() + first.numel());
    return BatchAction::run;
  }
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) override {
    if (--ends_after_ == 0) {
      has_ended_ = true;  // other ranks may take one more step
      trainer.save_checkpoint(folder_ / "end");
      trainer.request_stop("the test wants it");
    }
  }

 private:
  fs::path folder_;
  int64_t ends_after_;  // batches; negative: never
  bool has_ended_ = false;
  std::optional<int64_t> epoch_;
};

template <class M>
std::shared_ptr<TinyModule> made() {
  return make_module<M>();
}

// Returns the samples that all ranks see in the first epoch.
std::multiset<float> run_first_epoch(RunKind run, const fs::path& folder, int64_t ends_after,
                                     const std::string& ckpt_path,
                                     std::shared_ptr<TinyModule> (*make)() = made<TinyModule>) {
  std::vector<std::shared_ptr<FirstEpoch>> callbacks;
  for (int64_t rank = 0; rank < run.world_size; ++rank) {
    callbacks.push_back(std::make_shared<FirstEpoch>(folder, ends_after));
  }
  const auto on_rank = [&](int64_t rank) {
    TrainerOptions options = run.options;
    options.max_epochs = 1;
    options.devices = run.world_size;
    options.ckpt_path = ckpt_path;
    options.callbacks = {callbacks[static_cast<size_t>(rank)]};
    Trainer trainer(testing::quiet(options));
    trainer.fit(make(), {.train = DataLoader::make(tiny_dataset(96), {.batch_size = 4, .shuffle = true, .seed = 3})});
  };
  if (run.world_size == 1) {
    on_rank(0);
  } else {
    run_ranks(run.world_size, [&](World& world) { on_rank(world.rank()); });
  }
  std::multiset<float> all;
  for (const auto& callback : callbacks) all.insert(callback->samples.begin(), callback->samples.end());
  return all;
}

// After 20 samples, each of two ranks resumes in the middle of a batch.
TEST(Resume, GoesOnBetweenTwoBatches) {
  const TempDir dir;
  const fs::path first = dir.path() / "first", second = dir.path() / "second";
  std::multiset<float> all = run_first_epoch({}, first, /*ends_after=*/5, "");
  EXPECT_EQ(all.size(), 20U);
  all.merge(run_first_epoch({.options = {.strategy = "ddp"}, .world_size = 2}, second, -1, first / "end"));
  EXPECT_EQ(all.size(), 96U);
  EXPECT_EQ(std::set<float>(all.begin(), all.end()).size(), 96U);
}

// Every kind of run resumes from what every other saves in the middle of an epoch.
void expect_each_resumes_from_each(const std::vector<RunKind>& kinds) {
  const TempDir dir;
  std::multiset<float> whole;
  const at::Tensor x = tiny_dataset(96)->get_batch(at::arange(96))["x"].select(1, 0).contiguous();
  whole.insert(x.const_data_ptr<float>(), x.const_data_ptr<float>() + 96);
  for (size_t before = 0; before < kinds.size(); ++before) {
    const fs::path first = dir.path() / c10::str(before);
    const std::multiset<float> seen =
        run_first_epoch(kinds[before], first, /*ends_after=*/6 / kinds[before].world_size, "");
    EXPECT_EQ(seen.size(), 24U);
    for (size_t after = 0; after < kinds.size(); ++after) {
      SCOPED_TRACE(c10::str(before, " to ", after));
      const fs::path second = dir.path() / c10::str(before, "-", after);
      std::multiset<float> all = run_first_epoch(kinds[after], second, /*ends_after=*/-1, first / "end");
      all.insert(seen.begin(), seen.end());
      EXPECT_EQ(all, whole);  // each sample occurs once
      const auto saved = contents_of(first / "end"), loaded = contents_of(second / "begin");
      ASSERT_EQ(saved.size(), loaded.size());
      for (const auto& [name, tensor] : saved) EXPECT_TRUE(loaded.at(name).equal(tensor)) << name;
    }
  }
}

TEST(Resume, GoesOnWithOtherRanksAndStrategies) {
  expect_each_resumes_from_each({{.options = {.strategy = "single_device"}},
                                 {.options = {.strategy = "ddp"}, .world_size = 2},
                                 {.options = {.strategy = "ddp_sharded"}, .world_size = 3},
                                 {.options = {.strategy = ZeroOffload{.host = {.ratio = 0.5}}}, .world_size = 2},
                                 {.options = {.strategy = "ddp_sharded"}, .world_size = 1}});
}

TEST(Resume, GoesOnWithOtherGroupsOfRanks) {
  expect_each_resumes_from_each(
      {{.options = {.strategy = "ddp"}, .world_size = 2},
       {.options = {.strategy = DdpSharded{.shard_group = "2"}}, .world_size = 6},
       {.options = {.strategy = ZeroOffload{.host = {.ratio = 0.5}, .shard_group = "3"}}, .world_size = 6}});
}

TEST(Resume, IsExactWhereSeveralGroupsOfRanksHaveTheShards) {
  const std::vector<StrategyChoice> strategies{
      DdpSharded{.shard_group = "2"}, DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 2, .shard_group = "2"},
      DelayedUpdate{.warmup_steps = 2, .host = {.ratio = 0.5}, .shard_group = "2"}};
  for (const StrategyChoice& strategy : strategies) {
    SCOPED_TRACE(strategy.name());
    expect_exact_resume({.options = {.strategy = strategy}, .world_size = 4});
  }
}

TEST(Resume, TheWeightsOfACheckpointHaveTheUpdateThatWasUnderWayForAnotherStrategy) {
  const RunKind late{.options = {.strategy = DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0}}, .world_size = 2};
  for (const RunKind& other : {RunKind{.options = {.strategy = "single_device"}},
                               RunKind{.options = {.strategy = "ddp_sharded"}, .world_size = 3}}) {
    const TempDir dir;
    run_first_epoch(late, dir.path() / "late", 3, "");
    run_first_epoch(other, dir.path() / "other", -1, dir.path() / "late" / "end");
    const auto saved = contents_of(dir.path() / "late" / "end"), loaded = contents_of(dir.path() / "other" / "begin");
    for (const char* name : {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}) {
      EXPECT_FALSE(saved.at(name).flatten().equal(saved.at(std::string(name) + ":forward"))) << name;
      EXPECT_TRUE(loaded.at(name).equal(saved.at(name))) << name;
      EXPECT_TRUE(loaded.at(std::string(name) + ":exp_avg").equal(saved.at(std::string(name) + ":exp_avg"))) << name;
    }
  }
}

TEST(Resume, GoesOnFromTheMastersInAnotherPrecision) {
  for (const char* before : {"bf16-true", "16-true"}) {
    const TempDir dir;
    const RunKind rounded{.options = {.strategy = "single_device", .precision = before}};
    run_first_epoch(rounded, dir.path() / "rounded", 3, "");
    for (const RunKind& kind : {RunKind{.options = {.strategy = "single_device"}},
                                RunKind{.options = {.strategy = "ddp_sharded"}, .world_size = 2}}) {
      SCOPED_TRACE(c10::str(before, " to ", kind.options.strategy.name()));
      const fs::path folder = dir.path() / kind.options.strategy.name();
      run_first_epoch(kind, folder, -1, dir.path() / "rounded" / "end");
      const auto saved = contents_of(dir.path() / "rounded" / "end"), loaded = contents_of(folder / "begin");
      for (const char* name : {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}) {
        const at::Tensor master = saved.at(std::string(name) + ":master");
        EXPECT_FALSE(saved.at(name).flatten().equal(master)) << name;
        EXPECT_TRUE(loaded.at(name).flatten().equal(master)) << name;
      }
    }
  }
}

struct FreezesAfterThreeSteps : TinyModule {
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override {
    if (batch_idx == 2) hidden->weight.set_requires_grad(false);
  }
};

// In the first checkpoint a parameter is frozen while an update of it is in progress; in the second it is frozen, and
// an update of the others is in progress.
TEST(Resume, KeepsAnUpdateOfAParameterThatIsFrozen) {
  const RunKind late{.options = {.strategy = DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0}}, .world_size = 2};
  const TempDir dir;
  const fs::path first = dir.path() / "first", second = dir.path() / "second";
  run_first_epoch(late, first, 3, "", made<FreezesAfterThreeSteps>);
  run_first_epoch(late, second, 3, first / "end");
  const at::Tensor updated = contents_of(first / "end").at("hidden.weight");
  for (const RunKind& kind : {late, RunKind{.options = {.strategy = "single_device"}}}) {
    for (const fs::path& checkpoint : {first, second}) {
      SCOPED_TRACE(c10::str(kind.options.strategy.name(), " ", checkpoint.filename().string()));
      const fs::path folder = checkpoint / kind.options.strategy.name();
      run_first_epoch(kind, folder, 3, checkpoint / "end");
      EXPECT_TRUE(contents_of(folder / "end").at("hidden.weight").equal(updated));
    }
  }
}

}  // namespace
}  // namespace fulgur
