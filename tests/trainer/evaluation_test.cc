// Validation, test and prediction: the sanity check, several loaders, and what evaluation must leave as it was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>

#include <memory>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/seed.h"
#include "fulgur/core/callback.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/counting_module.h"
#include "tests/testing/errors.h"
#include "tests/testing/unsized_loader.h"

namespace fulgur {
namespace {

using testing::CountingModule;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Pair;
using testing::quiet;
using testing::tiny_loader;
using testing::UnsizedLoader;

int64_t sanity_batches(TrainerOptions options, LoaderList val) {
  const auto module = make_module<CountingModule>();
  Trainer(quiet(std::move(options))).fit(module, {.train = tiny_loader(8, 8), .val = std::move(val)});
  return module->sanity_checked;
}

TEST(SanityCheck, RunsTwoBatchesOfEachLoaderUnlessSaid) {
  EXPECT_EQ(sanity_batches({}, tiny_loader(40, 8)), 2);
  EXPECT_EQ(sanity_batches({}, {tiny_loader(40, 8), tiny_loader(40, 8)}), 4);
  EXPECT_EQ(sanity_batches({}, UnsizedLoader::make(tiny_loader(40, 8))), 2);
}

TEST(SanityCheck, RunsNoneAllOrAsManyAsTheLimitAllows) {
  EXPECT_EQ(sanity_batches({.num_sanity_val_steps = 0}, tiny_loader(40, 8)), 0);
  EXPECT_EQ(sanity_batches({.num_sanity_val_steps = -1}, tiny_loader(40, 8)), 5);
  EXPECT_EQ(sanity_batches({.limit_val_batches = Batches(1), .num_sanity_val_steps = 4}, tiny_loader(40, 8)), 1);
}

TEST(SanityCheck, LeavesTheRandomNumbersAsTheyWere) {
  struct Random : CountingModule {
    std::vector<double> drawn;
    at::Tensor training_step(const Batch& batch, int64_t i) override {
      drawn.push_back(torch::rand({}).item<double>());
      return CountingModule::training_step(batch, i);
    }
    void validation_step(const Batch&, int64_t) override { torch::rand({3}); }
  };
  std::vector<std::vector<double>> drawn;
  for (const int64_t num_sanity_val_steps : {0, 3}) {
    seed_everything(1);
    const auto module = make_module<Random>();
    Trainer(quiet({.num_sanity_val_steps = num_sanity_val_steps}))
        .fit(module, {.train = tiny_loader(), .val = tiny_loader()});
    drawn.push_back(module->drawn);
  }
  EXPECT_EQ(drawn[0], drawn[1]);
}

// Logs a value in each step.
struct LogsSteps : CountingModule {
  void validation_step(const Batch& batch, int64_t i) override {
    log("v", 1.0, {.prog_bar = true, .on_step = true});
    CountingModule::validation_step(batch, i);
  }
};
struct Watching : Callback {
  Metrics in_sanity_check, at_start, in_bar_at_start;
  std::vector<int64_t> steps;  // steps at which "v_step" was logged
  bool sent_in_sanity_check = false;
  void on_sanity_check_end(TrainerControl& trainer) override { in_sanity_check = trainer.metrics().callback_metrics(); }
  void on_train_start(TrainerControl& trainer) override {
    at_start = trainer.metrics().callback_metrics();
    in_bar_at_start = trainer.metrics().progress_bar_metrics();
    EXPECT_THAT(trainer.metrics().logged_metrics(), IsEmpty());
  }
  void on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) override {
    sent_in_sanity_check |= trainer.state().sanity_checking;
    if (metrics.contains("v_step")) steps.push_back(step);
  }
};

TEST(SanityCheck, ItsMetricsReachNobodyAfterIt) {
  const auto callback = std::make_shared<Watching>();
  Trainer(quiet({.log_every_n_steps = 1, .callbacks = {callback}}))
      .fit(make_module<LogsSteps>(), {.train = tiny_loader(8, 8), .val = tiny_loader(24, 8)});
  EXPECT_TRUE(callback->in_sanity_check.contains("val_loss"));
  EXPECT_THAT(callback->at_start, IsEmpty());
  EXPECT_THAT(callback->in_bar_at_start, IsEmpty());
  EXPECT_FALSE(callback->sent_in_sanity_check);
  EXPECT_THAT(callback->steps, ElementsAre(0, 1, 2));
}

// A model whose parts have modes of their own: a frozen norm below a part that trains, and the other way round.
struct Mixed : CountingModule {
  torch::nn::Sequential body{torch::nn::BatchNorm1d(4), torch::nn::Dropout(0.5)};
  bool all_in_eval = true;
  Mixed() {
    register_module("body", body);
    set_modes();
  }
  void set_modes() {
    body->eval();
    body[1]->train();
    hidden->eval();
  }
  std::vector<bool> modes() const {
    std::vector<bool> modes;
    for (const auto& part : torch::nn::Module::modules()) modes.push_back(part->is_training());
    return modes;
  }
  void look() {
    for (const bool training : modes()) all_in_eval &= !training;
  }
  void validation_step(const Batch&, int64_t) override { look(); }
  void test_step(const Batch&, int64_t) override { look(); }
  Batch predict_step(const Batch& batch, int64_t) override {
    look();
    return batch;
  }
  void on_validation_end() override {
    if (fail && !run_state().sanity_checking) throw std::runtime_error("no");
  }
  bool fail = false;
};

TEST(Evaluation, EveryPartIsInEvalModeAndThenInItsOwnAgain) {
  const auto module = make_module<Mixed>();
  const std::vector<bool> before = module->modes();
  const auto loader = tiny_loader(8, 8);
  Trainer trainer(quiet());
  trainer.fit(module, {.train = loader, .val = loader});
  EXPECT_EQ(module->modes(), before);
  trainer.validate(module, {.val = loader});
  EXPECT_EQ(module->modes(), before);
  trainer.test(module, {.test = loader});
  EXPECT_EQ(module->modes(), before);
  trainer.predict(module, {.predict = loader});
  EXPECT_EQ(module->modes(), before);
  EXPECT_TRUE(module->all_in_eval);
}

TEST(Evaluation, ModesAndGradientsAreRestoredIfItFails) {
  const auto module = make_module<Mixed>();
  const std::vector<bool> before = module->modes();
  module->fail = true;
  Trainer trainer(quiet());
  EXPECT_THROW(trainer.fit(module, {.train = tiny_loader(8, 8), .val = tiny_loader(8, 8)}), std::runtime_error);
  EXPECT_EQ(module->modes(), before);
  EXPECT_TRUE(at::GradMode::is_enabled());
}

// Logs 1 + the number of the loader, and records the loader and batch of each step.
struct ByLoader : CountingModule {
  std::vector<std::pair<int64_t, int64_t>> places;  // loader, batch
  void validation_step(const Batch&, int64_t i) override {
    places.emplace_back(dataloader_idx(), i);
    const auto value = static_cast<double>(1 + dataloader_idx());
    log("v", value);
    log("forked", value, {.on_step = true, .on_epoch = true});
    log("of_" + std::to_string(dataloader_idx()), value, {.add_dataloader_idx = false});
  }
  void on_validation_epoch_end() override { log("all", 7.0); }
  void test_step(const Batch&, int64_t i) override { log("batch", static_cast<double>(i)); }
};

// A stream that can be read once has nothing for the second validation.
TEST(Evaluation, ALoaderOfUnknownLengthThatYieldsNothingIsRefused) {
  struct ReadOnce : Loader {
    int64_t left = 2;
    void begin_epoch(int64_t) override {}
    std::optional<Batch> next() override {
      if (left-- <= 0) return std::nullopt;
      return Batch{{"x", torch::rand({4, 4})}, {"y", torch::rand({4, 1})}};
    }
    std::optional<int64_t> num_batches() const override { return std::nullopt; }
  };
  const auto once = std::make_shared<ReadOnce>();
  const auto module = make_module<testing::TinyModule>();
  Trainer trainer(quiet());
  EXPECT_FALSE(trainer.validate(module, {.val = {once}}).empty());
  EXPECT_THAT(message_of<SetupError>([&] { trainer.validate(module, {.val = {once}}); }),
              HasSubstr("the val loader yields no batch; can it be read only once?"));
}

TEST(SeveralLoaders, MetricsHaveTheLoadersNumberBehindTheirNames) {
  const auto module = make_module<ByLoader>();
  Trainer trainer(quiet());
  const Metrics metrics = trainer.validate(module, {.val = {tiny_loader(16, 8), tiny_loader(8, 8)}});
  EXPECT_THAT(metrics, ElementsAre(Pair("all", 7.0), Pair("forked_epoch/dataloader_idx_0", 1.0),
                                   Pair("forked_epoch/dataloader_idx_1", 2.0), Pair("of_0", 1.0), Pair("of_1", 2.0),
                                   Pair("v/dataloader_idx_0", 1.0), Pair("v/dataloader_idx_1", 2.0)));
  EXPECT_THAT(module->places, ElementsAre(Pair(0, 0), Pair(0, 1), Pair(1, 0)));
  EXPECT_EQ(module->validations.size(), 1U);
}

TEST(SeveralLoaders, OneLoaderHasNoNumber) {
  const auto module = make_module<ByLoader>();
  EXPECT_TRUE(Trainer(quiet()).validate(module, {.val = tiny_loader(8, 8)}).contains("v"));
}

TEST(SeveralLoaders, EachHasItsOwnMean) {
  const auto module = make_module<ByLoader>();
  const Metrics metrics = Trainer(quiet()).test(module, {.test = {tiny_loader(10, 8), tiny_loader(24, 8)}});
  EXPECT_THAT(metrics, ElementsAre(Pair("batch/dataloader_idx_0", DoubleEq((0.0 * 8 + 1.0 * 2) / 10)),
                                   Pair("batch/dataloader_idx_1", DoubleEq((0.0 + 1.0 + 2.0) / 3))));
}

TEST(SeveralLoaders, OfFitAreInTheCallbackMetrics) {
  Trainer trainer(quiet());
  trainer.fit(make_module<ByLoader>(), {.train = tiny_loader(8, 8), .val = {tiny_loader(8, 8), tiny_loader(8, 8)}});
  EXPECT_EQ(trainer.callback_metrics().at("v/dataloader_idx_1"), 2.0);
}

TEST(SeveralLoaders, PredictionsComeLoaderByLoader) {
  const auto predictions =
      Trainer(quiet()).predict(make_module<CountingModule>(), {.predict = {tiny_loader(12, 8), tiny_loader(3, 8)}});
  std::vector<int64_t> sizes;
  for (const Batch& prediction : predictions) sizes.push_back(prediction.batch_size());
  EXPECT_THAT(sizes, ElementsAre(8, 4, 3));
}

}  // namespace
}  // namespace fulgur
