// The order in which hooks fire: recorded, and compared with lists written by hand from Lightning's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/callback.h"
#include "optim/lr_schedulers.h"
#include "tests/testing/reporting_hooks.h"
#include "tests/testing/tiny.h"
#include "trainer/trainer.h"

namespace fulgur {
namespace {

using ::testing::ElementsAreArray;
using testing::tiny_loader;
using Calls = std::vector<std::string>;

struct RecordingModule : testing::ReportingModule {
  explicit RecordingModule(Calls* calls)
      : ReportingModule([calls](const std::string& hook) { calls->push_back("M." + hook); }) {}
};

// What loggers are sent is not part of the order.
struct RecordingCallback : testing::ReportingCallback {
  RecordingCallback(Calls* calls, const std::string& name, bool runs_last = false)
      : ReportingCallback([calls, name](const std::string& hook) {
          if (hook != "on_metrics") calls->push_back(name + "." + hook);
        }),
        last(runs_last) {}
  bool runs_last() const override { return last; }
  bool last;
};

// A list of calls. "X.hook" stands for that hook of every callback in order, then of the Module; "C.hook" for the
// callbacks' only.
Calls written(std::initializer_list<Calls> parts) {
  Calls all;
  for (const Calls& part : parts) {
    for (const std::string& call : part) {
      const std::string hook = call.substr(1);
      if (call[0] == 'X' || call[0] == 'C') all.insert(all.end(), {"A" + hook, "B" + hook, "last" + hook});
      if (call[0] == 'X') all.push_back("M" + hook);
      if (call[0] != 'X' && call[0] != 'C') all.push_back(call);
    }
  }
  return all;
}

const Calls kSetup{"M.configure_callbacks", "M.prepare_data", "X.setup", "M.configure_model"};
const Calls kFetch{"M.on_before_batch_transfer", "M.transfer_batch_to_device", "M.on_after_batch_transfer"};
const Calls kForwardBackward{"X.on_before_backward", "M.backward", "X.on_after_backward"};
const Calls kFirstOfWindow =
    written({kFetch, {"X.on_train_batch_start", "M.training_step", "X.on_before_zero_grad"}, kForwardBackward});
const Calls kInWindow = written({kFetch, {"X.on_train_batch_start", "M.training_step"}, kForwardBackward});
const Calls kUpdate{"X.on_before_optimizer_step", "M.configure_gradient_clipping", "M.optimizer_step"};
const Calls kBatchEnd{"X.on_train_batch_end"};
const Calls kValidation =
    written({{"M.on_validation_model_eval", "X.on_validation_start", "X.on_validation_epoch_start"},
             kFetch,
             {"X.on_validation_batch_start", "M.validation_step", "X.on_validation_batch_end",
              "X.on_validation_epoch_end", "X.on_validation_end", "M.on_validation_model_train"}});
const Calls kValidationInFit = written({{"M.on_validation_model_zero_grad"}, kValidation});
const Calls kEpochEnd{"A.on_train_epoch_end", "B.on_train_epoch_end", "M.on_train_epoch_end",
                      "last.on_train_epoch_end"};

// Runs an entry point with three callbacks, one of which wants to be last but is listed first.
template <class Body>
Calls record(TrainerOptions options, const Body& body) {
  Calls calls;
  options = testing::quiet(std::move(options));
  options.callbacks = {std::make_shared<RecordingCallback>(&calls, "last", true),
                       std::make_shared<RecordingCallback>(&calls, "A"),
                       std::make_shared<RecordingCallback>(&calls, "B")};
  Trainer trainer(std::move(options));
  body(trainer, make_module<RecordingModule>(&calls));
  return calls;
}

TEST(HookOrder, FitOfTwoEpochsWithSanityCheckAccumulationAndValidation) {
  const Calls calls = record({.max_epochs = 2, .accumulate_grad_batches = 2}, [](Trainer& trainer, const auto& module) {
    trainer.fit(module, {.train = tiny_loader(12, 4), .val = tiny_loader(4, 4)});  // 3 batches: the last is alone
  });
  const Calls epoch = written({{"X.on_train_epoch_start"},
                               kFirstOfWindow,
                               kBatchEnd,
                               kInWindow,
                               kUpdate,
                               kBatchEnd,
                               kFirstOfWindow,
                               kUpdate,
                               kBatchEnd,
                               kValidationInFit,
                               kEpochEnd});
  EXPECT_THAT(calls, ElementsAreArray(written({kSetup,
                                               {"M.configure_optimizers", "X.on_fit_start"},
                                               {"C.on_sanity_check_start"},
                                               kValidation,
                                               {"C.on_sanity_check_end"},
                                               {"X.on_train_start"},
                                               epoch,
                                               epoch,
                                               {"X.on_train_end", "X.on_fit_end", "X.teardown"}})));
}

TEST(HookOrder, ValidationWithinAWindowKeepsItsGradients) {
  const TrainerOptions options{
      .val_check_interval = Batches(1), .num_sanity_val_steps = 0, .accumulate_grad_batches = 2};
  const Calls calls = record(options, [](Trainer& trainer, const auto& module) {
    trainer.fit(module, {.train = tiny_loader(8, 4), .val = tiny_loader(4, 4)});
  });
  EXPECT_THAT(calls, ElementsAreArray(written(
                         {kSetup,
                          {"M.configure_optimizers", "X.on_fit_start", "X.on_train_start", "X.on_train_epoch_start"},
                          kFirstOfWindow,
                          kBatchEnd,
                          kValidation,
                          kInWindow,
                          kUpdate,
                          kBatchEnd,
                          kValidationInFit,
                          kEpochEnd,
                          {"X.on_train_end", "X.on_fit_end", "X.teardown"}})));
}

TEST(HookOrder, SchedulesMoveBeforeTheirBatchEndsAndPlateausAfterValidation) {
  struct Scheduled : RecordingModule {
    Scheduled(Calls* recorded, LRSchedulerConfig given) : RecordingModule(recorded), config(std::move(given)) {}
    LRSchedulerConfig config;
    Optimizers configure_optimizers() override { return {optim::AdamW(parameters(), {}), config}; }
  };
  const auto step_lr = optim::StepLR::make({.step_size = 1});
  const auto plateau = optim::ReduceLROnPlateau::make({});
  const auto moves = [](const LRSchedulerConfig& config) {  // what came before each move of the schedule
    Calls calls, before;
    Trainer(testing::quiet({.num_sanity_val_steps = 0}))
        .fit(make_module<Scheduled>(&calls, config), {.train = tiny_loader(8, 4), .val = tiny_loader(4, 4)});
    for (size_t i = 1; i < calls.size(); ++i) {
      if (calls[i] == "M.lr_scheduler_step") before.push_back(calls[i - 1]);
    }
    return before;
  };
  EXPECT_THAT(moves({.scheduler = step_lr, .interval = "step"}),
              ElementsAreArray({"M.optimizer_step", "M.optimizer_step"}));
  EXPECT_THAT(moves({.scheduler = step_lr}), ElementsAreArray({"M.optimizer_step"}));
  EXPECT_THAT(moves({.scheduler = plateau, .interval = "step", .monitor = "train_loss"}),
              ElementsAreArray({"M.on_train_batch_end", "M.on_validation_model_train"}));
  EXPECT_THAT(moves({.scheduler = plateau, .monitor = "val_loss"}), ElementsAreArray({"M.on_train_epoch_end"}));
}

TEST(HookOrder, Validate) {
  const Calls calls =
      record({}, [](Trainer& trainer, const auto& module) { trainer.validate(module, {.val = tiny_loader(4, 4)}); });
  EXPECT_THAT(calls, ElementsAreArray(written({kSetup, kValidation, {"X.teardown"}})));
}

TEST(HookOrder, Test) {
  const Calls calls =
      record({}, [](Trainer& trainer, const auto& module) { trainer.test(module, {.test = tiny_loader(4, 4)}); });
  EXPECT_THAT(calls, ElementsAreArray(
                         written({kSetup,
                                  {"M.on_test_model_eval", "X.on_test_start", "X.on_test_epoch_start"},
                                  kFetch,
                                  {"X.on_test_batch_start", "M.test_step", "X.on_test_batch_end", "X.on_test_epoch_end",
                                   "X.on_test_end", "M.on_test_model_train", "X.teardown"}})));
}

TEST(HookOrder, Predict) {
  const Calls calls =
      record({}, [](Trainer& trainer, const auto& module) { trainer.predict(module, {.predict = tiny_loader(4, 4)}); });
  EXPECT_THAT(calls, ElementsAreArray(written(
                         {kSetup,
                          {"M.on_predict_model_eval", "X.on_predict_start", "X.on_predict_epoch_start"},
                          kFetch,
                          {"X.on_predict_batch_start", "M.predict_step", "X.on_predict_batch_end",
                           "X.on_predict_epoch_end", "X.on_predict_end", "M.on_predict_model_train", "X.teardown"}})));
}

TEST(HookOrder, NoLoopHookWithNothingToPredict) {
  const Calls calls = record({.limit_predict_batches = Batches(0)}, [](Trainer& trainer, const auto& module) {
    trainer.predict(module, {.predict = tiny_loader(4, 4)});
  });
  EXPECT_THAT(calls, ElementsAreArray(written({kSetup, {"X.teardown"}})));
}

TEST(HookOrder, AnExceptionReachesEveryCallbackAndThenTeardown) {
  struct Failing : RecordingModule {
    using RecordingModule::RecordingModule;
    void on_train_start() override { throw std::runtime_error("no"); }
  };
  Calls calls;
  TrainerOptions options = testing::quiet({.num_sanity_val_steps = 0});
  options.callbacks = {std::make_shared<RecordingCallback>(&calls, "last", true),
                       std::make_shared<RecordingCallback>(&calls, "A"),
                       std::make_shared<RecordingCallback>(&calls, "B")};
  Trainer trainer(std::move(options));
  EXPECT_THROW(trainer.fit(make_module<Failing>(&calls), {.train = tiny_loader()}), std::runtime_error);
  EXPECT_THAT(
      calls,
      ElementsAreArray(written(
          {kSetup, {"M.configure_optimizers", "X.on_fit_start", "C.on_train_start", "C.on_exception", "X.teardown"}})));
}

}  // namespace
}  // namespace fulgur
