// Exceptions: whatever hook throws, every callback is notified, everything is torn down, the caller gets the same
// exception, and the Trainer works again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/exception_text.h"
#include "fulgur/core/callback.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/data_module.h"
#include "fulgur/data/dataset.h"
#include "fulgur/metrics/aggregation.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/reporting_hooks.h"
#include "tests/testing/tiny.h"
#include "tests/testing/without_warmup.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::quiet;
using testing::ReportingCallback;
using testing::ReportingModule;
using ::testing::StartsWith;
using testing::tiny_loader;
using testing::TinyModule;

// Throws at one place: "M.hook" of the Module, "C.hook" of a callback, "D.hook" of the DataModule; empty: nowhere.
struct Failpoint {
  std::string place;
  void reached(const std::string& here) const {
    if (here == place) throw std::domain_error(here);
  }
};

struct FailingModule : ReportingModule {
  explicit FailingModule(const Failpoint* failpoint)
      : ReportingModule([failpoint](const std::string& hook) { failpoint->reached("M." + hook); }) {}
  int teardowns = 0;
  Optimizers configure_optimizers() override {
    reached("configure_optimizers");
    return {optim::SGD(parameters()), {.scheduler = optim::StepLR::make({.step_size = 1})}};
  }
  void teardown(EntryPoint entry_point) override {
    ++teardowns;
    ReportingModule::teardown(entry_point);
  }
};

struct FailingCallback : ReportingCallback {
  explicit FailingCallback(const Failpoint* failpoint)
      : ReportingCallback([failpoint](const std::string& hook) { failpoint->reached("C." + hook); }) {}
};

// Records the exceptions that it is notified of; comes after the callback that fails.
struct Witness : Callback {
  std::vector<std::string> told;
  int teardowns = 0;
  void on_exception(TrainerControl&, const std::exception& error) override { told.emplace_back(error.what()); }
  void teardown(TrainerControl&, EntryPoint) override { ++teardowns; }
};

struct FailingData : DataModule {
  explicit FailingData(const Failpoint* given) : failpoint(given) {}
  const Failpoint* failpoint;
  std::vector<std::string> told;
  int teardowns = 0;
  std::shared_ptr<Loader> loader(const std::string& hook) const {
    failpoint->reached("D." + hook);
    return tiny_loader(16, 8);
  }
  void prepare_data() override { failpoint->reached("D.prepare_data"); }
  void setup(EntryPoint) override { failpoint->reached("D.setup"); }
  std::shared_ptr<Loader> train_dataloader() override { return loader("train_dataloader"); }
  LoaderList val_dataloader() override { return loader("val_dataloader"); }
  LoaderList test_dataloader() override { return loader("test_dataloader"); }
  LoaderList predict_dataloader() override { return loader("predict_dataloader"); }
  void on_exception(const std::exception& error) override { told.emplace_back(error.what()); }
  void teardown(EntryPoint) override {
    ++teardowns;
    failpoint->reached("D.teardown");
  }
};

// A Trainer, a module and data that all share a failpoint.
struct Scene {
  explicit Scene(std::string place) : failpoint{std::move(place)} {}

  Failpoint failpoint;
  std::shared_ptr<Witness> witness = std::make_shared<Witness>();
  FailingData data{&failpoint};
  std::shared_ptr<FailingModule> module = make_module<FailingModule>(&failpoint);
  Trainer trainer{
      quiet({.log_every_n_steps = 1, .callbacks = {std::make_shared<FailingCallback>(&failpoint), witness}})};

  void operator()() {  // calls the entry point that reaches `place`
    const auto concerns = [&](const char* stage) { return failpoint.place.find(stage) != std::string::npos; };
    if (concerns("test")) {
      trainer.test(module, data);
    } else if (concerns("predict")) {
      trainer.predict(module, data);
    } else {
      trainer.fit(module, data);
    }
  }
};

// What the message says about the hook: "M.training_step" -> "in training_step".
std::string told_place(const std::string& place) {
  const std::string hook = place.substr(2);
  return "in " + (hook.find("batch_t") == std::string::npos ? hook : "batch_transfer");
}

template <class Body>
std::exception_ptr thrown_by(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  ADD_FAILURE() << "nothing was thrown";
  return std::make_exception_ptr(0);
}

class Failure : public ::testing::TestWithParam<std::string> {};

TEST_P(Failure, IsToldWithTheHookThatItCameFrom) {
  Scene run(GetParam());
  EXPECT_THAT(text_of(thrown_by([&] { run(); })),
              AllOf(StartsWith(told_place(GetParam())), EndsWith(": " + GetParam())));
}

TEST_P(Failure, ReachesEveryoneAndTheCallerAndTheTrainerWorksAgain) {
  Scene run(GetParam());
  EXPECT_EQ(message_of<std::domain_error>([&] { run(); }), GetParam());
  EXPECT_THAT(run.witness->told, ElementsAre(GetParam()));
  EXPECT_THAT(run.data.told, ElementsAre(GetParam()));
  EXPECT_EQ(run.witness->teardowns, 1);
  EXPECT_EQ(run.data.teardowns, 1);
  EXPECT_EQ(run.module->teardowns, 1);
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_TRUE(run.module->is_training() && run.module->out->is_training());
  EXPECT_FALSE(run.trainer.state().sanity_checking);

  run.failpoint.place.clear();
  run();
  EXPECT_EQ(run.trainer.state().global_step, 2);
  EXPECT_TRUE(run.trainer.validate(run.module, run.data).contains("val_loss"));
  EXPECT_EQ(run.witness->told.size(), 1U);
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::ranges::replace(name, '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(OfData, Failure,
                         ::testing::Values("D.prepare_data", "D.setup", "D.train_dataloader", "D.val_dataloader",
                                           "D.test_dataloader", "D.predict_dataloader"),
                         test_name);

INSTANTIATE_TEST_SUITE_P(
    OfModule, Failure,
    ::testing::Values("M.prepare_data", "M.setup", "M.configure_model", "M.configure_callbacks",
                      "M.configure_optimizers", "M.on_fit_start", "M.on_train_start", "M.on_train_epoch_start",
                      "M.on_before_batch_transfer", "M.transfer_batch_to_device", "M.on_after_batch_transfer",
                      "M.on_train_batch_start", "M.training_step", "M.on_before_zero_grad", "M.on_before_backward",
                      "M.backward", "M.on_after_backward", "M.on_before_optimizer_step",
                      "M.configure_gradient_clipping", "M.optimizer_step", "M.lr_scheduler_step",
                      "M.on_train_batch_end", "M.on_validation_model_zero_grad", "M.on_validation_model_eval",
                      "M.on_validation_start", "M.on_validation_epoch_start", "M.on_validation_batch_start",
                      "M.validation_step", "M.on_validation_batch_end", "M.on_validation_epoch_end",
                      "M.on_validation_end", "M.on_validation_model_train", "M.on_train_epoch_end", "M.on_train_end",
                      "M.on_fit_end"),
    test_name);

INSTANTIATE_TEST_SUITE_P(OfModuleInTestAndPredict, Failure,
                         ::testing::Values("M.on_test_model_eval", "M.on_test_start", "M.on_test_epoch_start",
                                           "M.on_test_batch_start", "M.test_step", "M.on_test_batch_end",
                                           "M.on_test_epoch_end", "M.on_test_end", "M.on_test_model_train",
                                           "M.on_predict_model_eval", "M.on_predict_start", "M.on_predict_epoch_start",
                                           "M.on_predict_batch_start", "M.predict_step", "M.on_predict_batch_end",
                                           "M.on_predict_epoch_end", "M.on_predict_end", "M.on_predict_model_train"),
                         test_name);

INSTANTIATE_TEST_SUITE_P(OfCallback, Failure,
                         ::testing::Values("C.setup", "C.on_fit_start", "C.on_sanity_check_start",
                                           "C.on_sanity_check_end", "C.on_train_start", "C.on_train_epoch_start",
                                           "C.on_train_batch_start", "C.on_before_zero_grad", "C.on_before_backward",
                                           "C.on_after_backward", "C.on_before_optimizer_step", "C.on_train_batch_end",
                                           "C.on_validation_start", "C.on_validation_epoch_start",
                                           "C.on_validation_batch_start", "C.on_validation_batch_end",
                                           "C.on_validation_epoch_end", "C.on_validation_end", "C.on_train_epoch_end",
                                           "C.on_train_end", "C.on_fit_end", "C.on_metrics"),
                         test_name);

INSTANTIATE_TEST_SUITE_P(OfCallbackInTestAndPredict, Failure,
                         ::testing::Values("C.on_test_start", "C.on_test_epoch_start", "C.on_test_batch_start",
                                           "C.on_test_batch_end", "C.on_test_epoch_end", "C.on_test_end",
                                           "C.on_predict_start", "C.on_predict_epoch_start", "C.on_predict_batch_start",
                                           "C.on_predict_batch_end", "C.on_predict_epoch_end", "C.on_predict_end"),
                         test_name);

class TeardownFailure : public ::testing::TestWithParam<std::string> {};

TEST_P(TeardownFailure, ReachesTheCallerOnceEverythingIsTornDown) {
  Scene run(GetParam());
  EXPECT_EQ(message_of<std::domain_error>([&] { run(); }), GetParam());
  EXPECT_THAT(run.witness->told, IsEmpty());  // the run itself succeeded
  EXPECT_EQ(run.witness->teardowns, 1);
  EXPECT_EQ(run.data.teardowns, 1);
  EXPECT_EQ(run.module->teardowns, 1);
}

INSTANTIATE_TEST_SUITE_P(, TeardownFailure, ::testing::Values("D.teardown", "C.teardown", "M.teardown"), test_name);

TEST(Failures, OfOnExceptionAreToldAndHideNothing) {
  struct Fails : TinyModule {
    at::Tensor training_step(const Batch&, int64_t) override { throw std::runtime_error("first"); }
  };
  Scene run("C.on_exception");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(message_of<std::runtime_error>([&] { run.trainer.fit(make_module<Fails>(), run.data); }), "first");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("on_exception failed too: in on_exception: C.on_exception"));
  EXPECT_THAT(run.witness->told, ElementsAre("first"));
}

TEST(Failures, ADeviceWithoutMemoryBringsATableOfStrategies) {
  struct Large : TinyModule {
    at::Tensor training_step(const Batch&, int64_t) override {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 2.00 GiB.");
      return {};
    }
  };
  ::testing::internal::CaptureStderr();
  EXPECT_THAT(
      message_of<c10::OutOfMemoryError>([] { Trainer(quiet()).fit(make_module<Large>(), {.train = tiny_loader()}); }),
      HasSubstr("2.00 GiB"));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("the device is out of memory"), HasSubstr("single_device "), HasSubstr("zero_offload "),
                    HasSubstr("accumulate_grad_batches")));
}

TEST(Failures, OfAnyTypeAreToldAndReachTheCallerAsTheyAre) {
  struct ThrowsANumber : TinyModule {
    at::Tensor training_step(const Batch&, int64_t) override { throw 42; }
  };
  Scene run("");
  try {
    run.trainer.fit(make_module<ThrowsANumber>(), run.data);
    ADD_FAILURE() << "nothing was thrown";
  } catch (int number) {
    EXPECT_EQ(number, 42);
  }
  EXPECT_THAT(run.witness->told, ElementsAre(EndsWith(": an exception of type int")));
  EXPECT_EQ(run.witness->teardowns, 1);
}

TEST(Failures, OfOneModulesCallbacksAreNotToldToThoseOfTheModuleBefore) {
  struct WithWitness : TinyModule {
    explicit WithWitness(std::shared_ptr<Callback> given) : callback(std::move(given)) {}
    std::shared_ptr<Callback> callback;
    std::vector<std::shared_ptr<Callback>> configure_callbacks() override { return {callback}; }
  };
  const auto before = std::make_shared<Witness>();
  Trainer trainer(quiet());
  trainer.fit(make_module<WithWitness>(before), {.train = tiny_loader()});
  const Failpoint failpoint{"M.configure_callbacks"};
  EXPECT_THROW(trainer.fit(make_module<FailingModule>(&failpoint), {.train = tiny_loader()}), std::domain_error);
  EXPECT_THAT(before->told, IsEmpty());
  EXPECT_EQ(before->teardowns, 1);
}

// Includes strategies with ranks: on one device there is no other rank that a failure could have ended.
TEST(Failures, LeaveEveryStrategyUsableOnOneDevice) {
  struct FailsOnce : TinyModule {
    bool fails = true;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (std::exchange(fails, false)) throw std::runtime_error("once");
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  for (const char* strategy : {"single_device", "dp", "ddp", "ddp_sharded", "zero_offload", "delayed_update"}) {
    SCOPED_TRACE(strategy);
    Trainer trainer(quiet({.strategy = testing::without_warmup(strategy)}));
    const auto module = make_module<FailsOnce>();
    EXPECT_EQ(message_of<std::runtime_error>([&] { trainer.fit(module, {.train = tiny_loader()}); }), "once");
    trainer.fit(module, {.train = tiny_loader(40, 8)});
    EXPECT_EQ(trainer.state().global_step, 5);
  }
}

// A module and loaders that fail with libtorch's own error in one step.
struct WrongShape : TinyModule {
  std::string wrong;  // the step that fails
  explicit WrongShape(std::string step) : wrong(std::move(step)) {}
  void look_at(const std::string& step, const Batch& batch) {
    if (step == wrong) at::mm(batch["x"], batch["x"]);
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (batch_idx == 1) look_at("training_step", batch);
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch& batch, int64_t) override {
    look_at(run_state().sanity_checking ? "sanity check" : "validation_step", batch);
  }
  void test_step(const Batch& batch, int64_t) override {
    if (dataloader_idx() == 1) look_at("test_step", batch);
  }
  Batch predict_step(const Batch& batch, int64_t) override {
    look_at("predict_step", batch);
    return batch;
  }
};

TEST(Failures, AreToldWithStageEpochBatchAndShapes) {
  const std::string mm = "mat1 and mat2 shapes cannot be multiplied (8x4 and 8x4)";
  const auto told = [&](const std::string& step) {
    const auto module = make_module<WrongShape>(step);
    const Loaders loaders{.train = tiny_loader(16, 8),
                          .val = tiny_loader(8, 8),
                          .test = {tiny_loader(8, 8), tiny_loader(8, 8)},
                          .predict = tiny_loader(8, 8)};
    Trainer trainer(quiet());
    const std::exception_ptr failure = thrown_by([&] {
      if (step == "test_step") {
        trainer.test(module, loaders);
      } else if (step == "predict_step") {
        trainer.predict(module, loaders);
      } else {
        trainer.fit(module, loaders);
      }
    });
    EXPECT_THROW(std::rethrow_exception(failure), c10::Error);  // the exception is the one that was thrown
    return text_of(failure);
  };
  EXPECT_EQ(told("training_step"),
            "in training_step (train, epoch 0, batch 1 with x [8, 4] float, y [8, 1] float): " + mm);
  EXPECT_EQ(told("sanity check"),
            "in validation_step (sanity check, epoch 0, batch 0 with x [8, 4] float, y [8, 1] float): " + mm);
  EXPECT_EQ(told("validation_step"),
            "in validation_step (validate, epoch 0, batch 0 with x [8, 4] float, y [8, 1] float): " + mm);
  EXPECT_EQ(told("test_step"), "in test_step (test, batch 0 of loader 1 with x [8, 4] float, y [8, 1] float): " + mm);
  EXPECT_EQ(told("predict_step"), "in predict_step (predict, batch 0 with x [8, 4] float, y [8, 1] float): " + mm);
}

TEST(Failures, OfADatasetAreToldWithTheLoaderAndTheBatch) {
  struct Broken final : Dataset {
    int64_t size() const override { return 24; }
    Batch get(int64_t index, Random&) const override {
      if (index == 17) throw std::runtime_error("row 17 has 3 columns instead of 4");
      return {{"x", torch::zeros({4})}, {"y", torch::zeros({1})}};
    }
  };
  const auto loader = [] { return DataLoader::make(std::make_shared<Broken>(), {.batch_size = 8}); };
  const auto module = make_module<TinyModule>();
  EXPECT_EQ(text_of(thrown_by([&] { Trainer(quiet()).fit(module, {.train = loader()}); })),
            "in the train loader (train, epoch 0, batch 2), sample 17 of Broken: row 17 has 3 columns instead of 4");
  EXPECT_EQ(text_of(thrown_by([&] { Trainer(quiet()).test(module, {.test = {tiny_loader(), loader()}}); })),
            "in the test loader (test, batch 2 of loader 1), sample 17 of Broken: row 17 has 3 columns instead of 4");
}

TEST(Failures, OfATeardownAfterAFailedRunHaveTheirOwnPlace) {
  struct FailsTwice : TinyModule {
    at::Tensor training_step(const Batch&, int64_t) override { throw std::runtime_error("first"); }
    void teardown(EntryPoint) override { throw std::runtime_error("second"); }
  };
  ::testing::internal::CaptureStderr();
  const auto failure = thrown_by([] { Trainer(quiet()).fit(make_module<FailsTwice>(), {.train = tiny_loader()}); });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("teardown failed too: in teardown: second"));
  EXPECT_THAT(text_of(failure), StartsWith("in training_step (train, epoch 0, batch 0 with"));
}

TEST(Failures, TheOptimizersAreOutOfReachInTeardown) {
  struct Reaching : TinyModule {
    void teardown(EntryPoint) override { lr_scheduler(); }
  };
  EXPECT_THAT(message_of<c10::Error>([] { Trainer(quiet()).fit(make_module<Reaching>(), {.train = tiny_loader()}); }),
              HasSubstr("lr_scheduler() can only be called while fit runs"));
}

// Counts the samples of a pass, and fails once in its middle.
struct CountsSamples : TinyModule {
  metrics::Sum seen, trained;
  bool fails = true;

  void fail_at(int64_t batch_idx) {
    if (batch_idx == 1 && std::exchange(fails, false)) throw std::domain_error("the test wants it");
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    trained.update(torch::ones(batch.batch_size()));
    log("trained", trained);
    fail_at(batch_idx);
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch& batch, int64_t batch_idx) override {
    seen.update(torch::ones(batch.batch_size()));
    log("seen", seen);
    fail_at(batch_idx);
  }
};

TEST(FailedRuns, LeaveNoSamplesInAMetricThatWasLoggedByReference) {
  const auto module = make_module<CountsSamples>();
  Trainer trainer(quiet({.num_sanity_val_steps = 0}));
  const Loaders loaders{.train = tiny_loader(24, 8), .val = tiny_loader(16, 8)};
  EXPECT_THROW(trainer.validate(module, loaders), std::domain_error);
  EXPECT_EQ(trainer.validate(module, loaders).at("seen"), 16);
  module->fails = true;
  EXPECT_THROW(trainer.fit(module, loaders), std::domain_error);
  trainer.fit(module, loaders);
  EXPECT_EQ(trainer.callback_metrics().at("trained"), 24);
}

}  // namespace
}  // namespace fulgur
