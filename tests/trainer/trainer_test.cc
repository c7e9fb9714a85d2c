#include "fulgur/trainer/trainer.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/lambda_callback.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using testing::at_batch_end;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

TEST(Trainer, CountsEpochsAndSteps) {
  Trainer trainer(quiet({.max_epochs = 3}));
  trainer.fit(make_module<TinyModule>(), {.train = tiny_loader(40, 8)});
  EXPECT_EQ(trainer.state().epoch, 3);
  EXPECT_EQ(trainer.state().global_step, 15);
}

TEST(Trainer, FitStartsAnewEachTime) {
  Trainer trainer(quiet({.max_epochs = 2}));
  for (int i = 0; i < 2; ++i) {
    trainer.fit(make_module<TinyModule>(), {.train = tiny_loader(40, 8)});
    EXPECT_EQ(trainer.state().global_step, 10);
  }
}

TEST(Trainer, SameSeedGivesTheSameBits) {
  std::vector<std::vector<double>> losses;
  for (const uint64_t seed : {5, 5, 6}) {
    seed_everything(seed);
    const auto module = make_module<TinyModule>();
    Trainer(quiet({.max_epochs = 3})).fit(module, {.train = tiny_loader(40, 8, /*shuffle=*/true)});
    losses.push_back(module->train_losses);
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_NE(losses[0], losses[2]);
}

TEST(Trainer, ValidatesEveryNEpochs) {
  struct Counting : TinyModule {
    int validations = 0;
    void on_validation_end() override { validations += !run_state().sanity_checking; }
  };
  const auto module = make_module<Counting>();
  Trainer(quiet({.max_epochs = 5, .check_val_every_n_epoch = 2}))
      .fit(module, {.train = tiny_loader(), .val = tiny_loader()});
  EXPECT_EQ(module->validations, 2);
}

TEST(Trainer, EvaluationHasNoGradientsAndRestoresModes) {
  struct Modes : TinyModule {
    int64_t validated = 0, epochs = 0;
    void on_train_epoch_start() override { hidden->eval(); }  // a part that the user froze in eval mode
    void validation_step(const Batch& batch, int64_t) override {
      ++validated;
      EXPECT_FALSE(is_training() || hidden->is_training() || out->is_training());
      EXPECT_FALSE(loss(batch).requires_grad());
    }
    void on_train_epoch_end() override {
      ++epochs;
      EXPECT_TRUE(is_training() && !hidden->is_training() && out->is_training());
    }
  };
  const auto module = make_module<Modes>();
  Trainer(quiet({.max_epochs = 2, .num_sanity_val_steps = 1}))
      .fit(module, {.train = tiny_loader(), .val = tiny_loader()});
  EXPECT_EQ(module->validated, 1 + 2 * 5);
  EXPECT_EQ(module->epochs, 2);
}

TEST(Trainer, TestReturnsTheMeanOverSamples) {
  const auto module = make_module<TinyModule>();
  const Metrics metrics = Trainer(quiet()).test(module, {.test = tiny_loader(10, 8)});  // batches of 8 and 2
  const at::NoGradGuard no_grad;
  const double expected = module->loss(testing::tiny_dataset(10)->samples()).item<double>();
  EXPECT_NEAR(metrics.at("test_loss"), expected, 1e-6 * expected);
}

TEST(Trainer, PredictReturnsAResultForEachBatch) {
  const auto module = make_module<TinyModule>();
  const auto predictions = Trainer(quiet()).predict(module, {.predict = tiny_loader(10, 8)});
  ASSERT_EQ(predictions.size(), 2U);
  EXPECT_EQ(predictions[1].batch_size(), 2);
  EXPECT_FALSE(predictions[0]["y"].requires_grad());
}

TEST(Trainer, CallbackMetricsHoldTrainingAndValidation) {
  Trainer trainer(quiet({.max_epochs = 1}));
  const auto module = make_module<TinyModule>();
  trainer.fit(module, {.train = tiny_loader(), .val = tiny_loader()});
  EXPECT_EQ(trainer.callback_metrics().at("train_loss"), module->train_losses.back());
  EXPECT_TRUE(trainer.callback_metrics().contains("val_loss"));
}

TEST(Trainer, ARequestedStopEndsFitAfterTheBatch) {
  TrainerOptions options = quiet({.max_epochs = 5});
  options.callbacks = {at_batch_end([](TrainerControl& trainer) { trainer.request_stop("enough"); })};
  Trainer trainer(options);
  trainer.fit(make_module<TinyModule>(), {.train = tiny_loader()});
  EXPECT_EQ(trainer.state().global_step, 1);
}

TEST(Trainer, AModuleMayAskForAStop) {
  struct Stops : TinyModule {
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override {
      if (batch_idx == 1) request_stop("enough");
    }
  };
  Trainer trainer(quiet({.max_epochs = 5}));
  trainer.fit(make_module<Stops>(), {.train = tiny_loader()});
  EXPECT_EQ(trainer.state().global_step, 2);
}

TEST(Trainer, TakesADataModule) {
  struct Data : DataModule {
    std::vector<std::string> calls;
    void prepare_data() override { calls.emplace_back("prepare_data"); }
    void setup(EntryPoint) override { calls.emplace_back("setup"); }
    std::shared_ptr<Loader> train_dataloader() override {
      calls.emplace_back("train_dataloader");
      return tiny_loader(40, 8);
    }
    void teardown(EntryPoint) override { calls.emplace_back("teardown"); }
  };
  Data data;
  Trainer trainer(quiet());
  trainer.fit(make_module<TinyModule>(), data);
  EXPECT_EQ(trainer.state().global_step, 5);
  EXPECT_THAT(data.calls, ElementsAre("prepare_data", "setup", "train_dataloader", "teardown"));
}

TEST(Trainer, WritesMetricsAndCheckpointsIntoItsRunFolder) {
  const testing::TempDir dir;
  TrainerOptions options{.accelerator = "cpu",
                         .max_epochs = 2,
                         .default_root_dir = dir.path().string(),
                         .enable_progress_bar = false,
                         .enable_model_summary = false};
  Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader(40, 8), .val = tiny_loader()});
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "runs/version_0/metrics.csv"));
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "runs/version_0/checkpoints/epoch=1-step=10/model.safetensors"));
  Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader(40, 8)});
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "runs/version_1"));
}

TEST(Trainer, SaysWhereItsRunIs) {
  const testing::TempDir dir;
  TrainerOptions options = quiet({.log_every_n_steps = 1});
  options.logger = std::nullopt;
  options.default_root_dir = dir.path().string();
  Trainer trainer(options);
  EXPECT_THAT(message_of<UsageError>([&] { trainer.run_dir(); }), HasSubstr("from the first fit, validate, test"));
  trainer.fit(make_module<TinyModule>(), {.train = tiny_loader()});
  EXPECT_EQ(trainer.run_dir(), dir.path() / "runs/version_0");
  EXPECT_TRUE(std::filesystem::exists(trainer.run_dir() / "metrics.csv"));
}

TEST(Trainer, WritesNothingThatIsTurnedOff) {
  const testing::TempDir dir;
  TrainerOptions options = quiet();
  options.default_root_dir = dir.path().string();
  Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(TrainerRefuses, ANullCallback) {
  TrainerOptions options = quiet();
  options.callbacks = {nullptr};
  EXPECT_THAT(message_of<UsageError>([&] { Trainer trainer(options); }), HasSubstr("null"));
}

TEST(Trainer, CallbacksOfTheModuleTakeThePlaceOfThoseOfTheirType) {
  struct Own : TinyModule {
    int calls = 0;
    std::vector<std::shared_ptr<Callback>> configure_callbacks() override {
      return {at_batch_end([this](TrainerControl&) { ++calls; })};
    }
  };
  int replaced = 0;
  TrainerOptions options = quiet();
  options.callbacks = {at_batch_end([&](TrainerControl&) { ++replaced; })};
  const auto module = make_module<Own>();
  Trainer(options).fit(module, {.train = tiny_loader(40, 8)});
  EXPECT_EQ(module->calls, 5);
  EXPECT_EQ(replaced, 0);
}

TEST(Trainer, RefusesOneLoaderForTrainingAndForValidationWithinTheEpoch) {
  const auto loader = tiny_loader();
  Trainer(quiet()).fit(make_module<TinyModule>(), {.train = loader, .val = loader});
  Trainer trainer(quiet({.val_check_interval = Fraction(0.5)}));
  EXPECT_THAT(message_of<SetupError>([&] { trainer.fit(make_module<TinyModule>(), {.train = loader, .val = loader}); }),
              HasSubstr("make two of the same dataset"));
}

TEST(Trainer, DebugModesHoldInTheRunAndEndWithIt) {
  struct Asking : TinyModule {
    std::vector<bool> deterministic, anomaly;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      ask();
      return TinyModule::training_step(batch, batch_idx);
    }
    void test_step(const Batch&, int64_t) override { ask(); }
    void ask() {
      deterministic.push_back(at::globalContext().deterministicAlgorithms());
      anomaly.push_back(torch::autograd::AnomalyMode::is_enabled());
    }
  };
  const auto module = make_module<Asking>();
  Trainer trainer(quiet({.detect_anomaly = true, .deterministic = true}));
  trainer.fit(module, {.train = tiny_loader(8, 8)});
  trainer.test(module, {.test = tiny_loader(8, 8)});
  module->ask();
  EXPECT_THAT(module->deterministic, ::testing::ElementsAre(true, true, false));
  EXPECT_THAT(module->anomaly, ::testing::ElementsAre(true, false, false));
}

TEST(Trainer, ADeterministicRunRefusesAnOperationThatIsNot) {
  struct Alerts : TinyModule {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      at::globalContext().alertNotDeterministic("an_operation");
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/true);
  Trainer trainer(quiet({.deterministic = true}));
  EXPECT_THAT(message_of<c10::Error>([&] { trainer.fit(make_module<Alerts>(), {.train = tiny_loader()}); }),
              HasSubstr("an_operation does not have a deterministic implementation"));
  EXPECT_TRUE(at::globalContext().deterministicAlgorithmsWarnOnly());  // as before
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
}

TEST(Trainer, SwitchesOfLibtorchHoldInTheRunAndAreRestored) {
  struct Asking : TinyModule {
    std::vector<bool> benchmark;
    std::vector<at::Float32MatmulPrecision> precision;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      ask();
      return TinyModule::training_step(batch, batch_idx);
    }
    void ask() {
      benchmark.push_back(at::globalContext().benchmarkCuDNN());
      precision.push_back(at::globalContext().float32MatmulPrecision());
    }
  };
  using enum at::Float32MatmulPrecision;
  const auto module = make_module<Asking>();
  at::globalContext().setFloat32MatmulPrecision("medium");
  Trainer(quiet({.benchmark = true, .float32_matmul_precision = "high"})).fit(module, {.train = tiny_loader(8, 8)});
  module->ask();
  Trainer(quiet()).fit(module, {.train = tiny_loader(8, 8)});
  at::globalContext().setFloat32MatmulPrecision("highest");
  EXPECT_THAT(module->benchmark, ::testing::ElementsAre(true, false, false));
  EXPECT_THAT(module->precision, ::testing::ElementsAre(HIGH, MEDIUM, MEDIUM));
}

TEST(Trainer, RefusesABenchmarkBesideDeterministicAndUnknownPrecisionsOfProducts) {
  EXPECT_THAT(message_of<UsageError>([] { Trainer(quiet({.deterministic = true, .benchmark = true})); }),
              HasSubstr("leave one of them out"));
  EXPECT_THAT(message_of<UsageError>([] { Trainer(quiet({.float32_matmul_precision = "hihg"})); }),
              HasSubstr("float32_matmul_precision"));
}

TEST(Trainer, AScheduleThatIsNotStrictWaitsForItsMetric) {
  struct Waiting : TinyModule {
    Optimizers configure_optimizers() override {
      return {optim::AdamW(parameters(), {.lr = 1.0}),
              {.scheduler = optim::ReduceLROnPlateau::make({.patience = 0}), .monitor = "late", .strict = false}};
    }
    void on_train_epoch_end() override {
      if (current_epoch() > 0) log("late", 1.0);
      lrs.push_back(lr);
    }
    void on_before_optimizer_step(Optimizer& optimizer) override { lr = optimizer.groups()[0].lr; }
    double lr = 0.0;
    std::vector<double> lrs;
  };
  const auto module = make_module<Waiting>();
  Trainer(quiet({.max_epochs = 4})).fit(module, {.train = tiny_loader(8, 8)});
  ASSERT_EQ(module->lrs.size(), 4U);
  EXPECT_EQ(module->lrs[2], 1.0);  // no value after epoch 0, the first value after epoch 1
  EXPECT_NEAR(module->lrs[3], 0.1, 1e-12);
}

TEST(Trainer, GradientsAreThoseOfTheMeanForWhoWantsThem) {
  struct Norms : Callback {
    explicit Norms(bool given) : wants(given) {}
    bool wants;
    std::vector<double> norms;
    bool wants_gradients() const override { return wants; }
    void on_before_optimizer_step(TrainerControl& trainer, Optimizer&) override {
      norms.push_back(gradient_norm(trainer.module().parameters()).item<double>());
    }
  };
  const auto norm = [](bool wants) {
    seed_everything(1);
    const auto callback = std::make_shared<Norms>(wants);
    TrainerOptions options = quiet({.accumulate_grad_batches = 4});
    options.callbacks = {callback};
    Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader(32, 8)});
    return callback->norms.at(0);
  };
  EXPECT_NEAR(norm(false) / norm(true), 4.0, 1e-5);
}

// Trains a child of the module from an epoch on, with a learning rate of its own; the child is frozen until then.
struct Finetuning final : Callback {
  std::string child;
  int64_t from_epoch;
  double lr;
  std::vector<size_t> groups;  // number of groups at the start of each epoch
  Finetuning(std::string name, int64_t epoch, double rate) : child(std::move(name)), from_epoch(epoch), lr(rate) {}

  static std::vector<at::Tensor> set_requires_grad(TrainerControl& trainer, const std::string& name, bool value) {
    std::vector<at::Tensor> params = trainer.module().named_children()[name]->parameters();
    for (at::Tensor& param : params) param.requires_grad_(value);
    return params;
  }
  void setup(TrainerControl& trainer, EntryPoint) override {
    set_requires_grad(trainer, child, false);
    EXPECT_TRUE(trainer.optimizers().empty());  // there are none yet
  }
  void on_train_epoch_start(TrainerControl& trainer) override {
    const Optimizers& optimizers = trainer.optimizers();
    if (trainer.state().epoch == from_epoch) {
      optimizers[0].add_param_group({.params = set_requires_grad(trainer, child, true), .lr = lr});
    }
    groups.push_back(optimizers[0].groups().size());
  }
};

TEST(Trainer, AFinetuningCallbackTrainsALayerFromAnEpochOnAsTorchDoes) {
  struct Head : TinyModule {
    Optimizers configure_optimizers() override { return optim::SGD(out->parameters(), {.lr = 0.1, .momentum = 0.9}); }
  };
  seed_everything(1);
  const auto module = make_module<Head>(), expected = make_module<Head>();
  {
    const c10::NoGradGuard no_grad;
    for (const auto& item : module->named_parameters()) {
      expected->named_parameters()[item.key()].copy_(item.value());
    }
  }
  const auto finetuning = std::make_shared<Finetuning>("hidden", /*epoch=*/1, /*rate=*/0.01);
  TrainerOptions options = quiet({.max_epochs = 3});
  options.callbacks = {finetuning};
  Trainer(options).fit(module, {.train = tiny_loader(40, 8)});
  EXPECT_THAT(finetuning->groups, ElementsAre(1, 2, 2));

  torch::optim::SGD sgd(expected->out->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    for (at::Tensor& param : expected->hidden->parameters()) param.requires_grad_(epoch > 0);
    if (epoch == 1) {
      auto own = std::make_unique<torch::optim::SGDOptions>(0.01);
      own->momentum(0.9);
      sgd.add_param_group({expected->hidden->parameters(), std::move(own)});
    }
    const auto loader = tiny_loader(40, 8);
    loader->begin_epoch(epoch);
    while (const auto batch = loader->next()) {
      sgd.zero_grad();
      expected->loss(*batch).backward();
      sgd.step();
    }
  }
  for (const auto& item : module->named_parameters()) {
    EXPECT_TRUE(item.value().allclose(expected->named_parameters()[item.key()], 1e-5, 1e-7)) << item.key();
  }
}

// As the metrics of a step are.
TEST(Trainer, ARecordIsSentOnceForAStepHoweverManyMicroBatchesItHas) {
  struct Notes : TinyModule {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      log_text("note", "batch " + std::to_string(batch_idx));
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  std::vector<std::pair<int64_t, std::string>> notes;
  const auto keep = [&](TrainerControl&, const Record& record, int64_t step) {
    notes.emplace_back(step, std::get<Text>(record.content).text);
  };
  TrainerOptions options{.accumulate_grad_batches = 2, .callbacks = {LambdaCallback::make({.on_record = keep})}};
  options.log_every_n_steps = 2;
  Trainer(quiet(options)).fit(make_module<Notes>(), {.train = tiny_loader(64, 8)});
  EXPECT_THAT(notes, ElementsAre(std::pair(1, "batch 3"), std::pair(3, "batch 7")));
}

TEST(Trainer, ALayerMayBeTrainedFromTheMiddleOfARunOn) {
  struct Thawing : TinyModule {
    std::vector<bool> in_bucket;  // whether its weights are in a bucket, after each batch
    Thawing() {
      for (const at::Tensor& param : hidden->parameters()) at::Tensor(param).requires_grad_(false);
    }
    Optimizers configure_optimizers() override { return optim::AdamW(out->parameters(), {.lr = 1e-2}); }
    void on_before_optimizer_step(Optimizer& optimizer) override {
      if (global_step() != 2) return;
      for (const at::Tensor& param : hidden->parameters()) at::Tensor(param).requires_grad_(true);
      optimizer.add_param_group({.params = hidden->parameters(), .lr = 1e-3});
    }
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
      in_bucket.push_back(hidden->weight.storage().nbytes() > hidden->weight.nbytes());
    }
  };
  const auto module = make_module<Thawing>();
  const at::Tensor before = module->hidden->weight.detach().clone();
  Trainer(quiet()).fit(module, {.train = tiny_loader(40, 8)});
  EXPECT_THAT(module->in_bucket, ElementsAre(false, false, true, true, true));
  EXPECT_FALSE(module->hidden->weight.equal(before));
}

}  // namespace
}  // namespace fulgur
