// The order in which hooks fire: recorded, and compared with lists written by hand from Lightning's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/callbacks/lambda_callback.h"
#include "fulgur/core/callback.h"
#include "fulgur/data/data_module.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/reporting_hooks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::ElementsAreArray;
using testing::tiny_loader;
using Calls = std::vector<std::string>;

struct RecordingModule : testing::ReportingModule {
  explicit RecordingModule(Calls* given)
      : ReportingModule([given](const std::string& hook) { given->push_back("M." + hook); }), calls(given) {}
  Calls* calls;
  void on_save_checkpoint(State&) override { reached("on_save_checkpoint"); }
  void on_load_checkpoint(const State&) override { reached("on_load_checkpoint"); }
};

// What loggers receive is not part of the order.
struct RecordingCallback : testing::ReportingCallback {
  RecordingCallback(Calls* calls, const std::string& name, bool runs_last = false)
      : ReportingCallback([calls, name](const std::string& hook) {
          if (hook != "on_metrics") calls->push_back(name + "." + hook);
        }),
        loaded(calls),
        load(name + ".load_state"),
        last(runs_last) {}
  bool runs_last() const override { return last; }
  std::string state_key() const override { return load; }
  State state() const override {
    State state;
    state.set("name", load);
    return state;
  }
  void load_state(const State& state) override {
    EXPECT_EQ(state.get<std::string>("name"), load);
    loaded->push_back(load);
  }
  Calls* loaded;
  std::string load;
  bool last;
};

// Records the calls to a DataModule among the other calls.
struct RecordingData : DataModule {
  explicit RecordingData(Calls* calls) : calls_(calls) {}
  void prepare_data() override { calls_->push_back("D.prepare_data"); }
  void setup(EntryPoint) override { calls_->push_back("D.setup"); }
  std::shared_ptr<Loader> train_dataloader() override { return loader("D.train_dataloader"); }
  LoaderList val_dataloader() override { return loader("D.val_dataloader"); }
  Batch on_before_batch_transfer(Batch batch) override {
    calls_->push_back("D.on_before_batch_transfer");
    return batch;
  }
  Batch on_after_batch_transfer(Batch batch) override {
    calls_->push_back("D.on_after_batch_transfer");
    return batch;
  }
  State state() const override {
    calls_->push_back("D.state");
    State state;
    state.set("split", int64_t{7});
    return state;
  }
  void load_state(const State& state) override {
    EXPECT_EQ(state.get<int64_t>("split"), 7);
    calls_->push_back("D.load_state");
  }
  void on_exception(const std::exception&) override { calls_->push_back("D.on_exception"); }
  void teardown(EntryPoint) override { calls_->push_back("D.teardown"); }

 private:
  std::shared_ptr<Loader> loader(const char* hook) const {
    calls_->push_back(hook);
    return tiny_loader(8, 4);  // 2 batches
  }
  Calls* calls_;
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
// Callbacks that the options have already are not recorded.
template <class M = RecordingModule, class Body>
Calls record(TrainerOptions options, const Body& body) {
  Calls calls;
  options = testing::quiet(std::move(options));
  options.callbacks.insert(options.callbacks.end(), {std::make_shared<RecordingCallback>(&calls, "last", true),
                                                     std::make_shared<RecordingCallback>(&calls, "A"),
                                                     std::make_shared<RecordingCallback>(&calls, "B")});
  Trainer trainer(std::move(options));
  body(trainer, make_module<M>(&calls));
  return calls;
}

Calls record_with_data(TrainerOptions options) {
  return record(std::move(options), [](Trainer& trainer, const std::shared_ptr<RecordingModule>& module) {
    RecordingData data(module->calls);
    trainer.fit(module, data);
  });
}

TEST(HookOrder, FitOfTwoEpochsWithSanityCheckAccumulationAndValidation) {
  const Calls calls = record({.max_epochs = 2, .accumulate_grad_batches = 2}, [](Trainer& trainer, const auto& module) {
    trainer.fit(module, {.train = tiny_loader(12, 4), .val = tiny_loader(4, 4)});  // 3 batches: the last step has one
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

TEST(HookOrder, AValidationThatIsDueWithinAWindowRunsAtItsEnd) {
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
  const auto moves = [](const LRSchedulerConfig& config) {  // returns the call before each move of the schedule
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

const Calls kFetchOfData{"D.on_before_batch_transfer", "M.on_before_batch_transfer", "M.transfer_batch_to_device",
                         "D.on_after_batch_transfer", "M.on_after_batch_transfer"};
const Calls kStepOfData = written({kFetchOfData,
                                   {"X.on_train_batch_start", "M.training_step", "X.on_before_zero_grad"},
                                   kForwardBackward,
                                   kUpdate,
                                   kBatchEnd});
const Calls kSetupOfData{"M.configure_callbacks", "D.prepare_data", "M.prepare_data", "D.setup", "X.setup",
                         "M.configure_model"};
const Calls kTeardownOfData{"X.on_train_end", "X.on_fit_end", "D.teardown", "X.teardown"};

// The checkpoint is written after the first of two batches.
TEST(HookOrder, FitWithADataModuleThatSavesAndTheRunThatGoesOn) {
  const testing::TempDir dir;
  const auto saves = testing::at_batch_end([&](TrainerControl& trainer) {
    if (trainer.state().batch_idx == 0) trainer.save_checkpoint(dir.path() / "saved");
  });
  const Calls first = record_with_data({.limit_val_batches = Batches(0), .callbacks = {saves}});
  EXPECT_THAT(first, ElementsAreArray(written({kSetupOfData,
                                               {"D.train_dataloader", "M.configure_optimizers", "X.on_fit_start",
                                                "X.on_train_start", "X.on_train_epoch_start"},
                                               kStepOfData,
                                               {"M.on_save_checkpoint", "D.state"},
                                               kStepOfData,
                                               kEpochEnd,
                                               kTeardownOfData})));
  const Calls second =
      record_with_data({.limit_val_batches = Batches(0), .ckpt_path = (dir.path() / "saved").string()});
  EXPECT_THAT(
      second,
      ElementsAreArray(written({kSetupOfData,
                                {"D.load_state", "D.train_dataloader", "M.configure_optimizers", "M.on_load_checkpoint",
                                 "C.load_state", "X.on_fit_start", "X.on_train_start", "X.on_train_epoch_start"},
                                kStepOfData,
                                kEpochEnd,
                                kTeardownOfData})));
}

TEST(HookOrder, ADataModuleIsAskedForTrainingAndThenForValidation) {
  const Calls calls = record_with_data({.limit_train_batches = Batches(1), .limit_val_batches = Batches(1)});
  const Calls asked{"D.train_dataloader", "D.val_dataloader", "M.configure_optimizers"};
  EXPECT_NE(std::ranges::search(calls, asked).begin(), calls.end());
}

TEST(HookOrder, ManualOptimisation) {
  struct Manual : RecordingModule {
    explicit Manual(Calls* recorded) : RecordingModule(recorded) { automatic_optimization = false; }
    at::Tensor training_step(const Batch& batch, int64_t) override {
      reached("training_step");
      optimizer().zero_grad();
      manual_backward(loss(batch));
      optimizer().step();
      reached("training_step ends");
      return {};
    }
  };
  const Calls calls = record<Manual>(
      {}, [](Trainer& trainer, const auto& module) { trainer.fit(module, {.train = tiny_loader(4, 4)}); });
  EXPECT_THAT(calls, ElementsAreArray(written(
                         {kSetup,
                          {"M.configure_optimizers", "X.on_fit_start", "X.on_train_start", "X.on_train_epoch_start"},
                          kFirstOfWindow,
                          kUpdate,
                          {"M.training_step ends"},
                          kBatchEnd,
                          kEpochEnd,
                          {"X.on_train_end", "X.on_fit_end", "X.teardown"}})));
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

// Each function is called where a callback's hook of the same name is.
TEST(LambdaCallback, HasAFunctionForEachHook) {
  struct Overrides : testing::ReportingCallback {
    explicit Overrides(Calls* given)
        : ReportingCallback([given](const std::string& hook) { given->push_back(hook); }), calls(given) {}
    void on_record(TrainerControl&, const Record&, int64_t) override { calls->push_back("on_record"); }
    void on_checkpoint_saved(TrainerControl&, const std::filesystem::path&) override {
      calls->push_back("on_checkpoint_saved");
    }
    Calls* calls;
  };
  struct Failing : testing::TinyModule {
    void on_train_start() override { throw std::runtime_error("no"); }
  };
  Calls expected, calls;
  const auto adds = [&calls](const char* hook) { return [&calls, hook](auto&&...) { calls.push_back(hook); }; };
#define M_FIELD(hook) .hook = adds(#hook)
  const auto lambda = LambdaCallback::make({M_FIELD(setup),
                                            M_FIELD(on_fit_start),
                                            M_FIELD(on_sanity_check_start),
                                            M_FIELD(on_sanity_check_end),
                                            M_FIELD(on_train_start),
                                            M_FIELD(on_train_epoch_start),
                                            .on_train_batch_start =
                                                [&calls](TrainerControl&, const Batch&, int64_t batch_idx) {
                                                  calls.push_back("on_train_batch_start");
                                                  return batch_idx == 1 ? BatchAction::skip_epoch : BatchAction::run;
                                                },
                                            M_FIELD(on_before_zero_grad),
                                            M_FIELD(on_before_backward),
                                            M_FIELD(on_after_backward),
                                            M_FIELD(on_before_optimizer_step),
                                            M_FIELD(on_train_batch_end),
                                            M_FIELD(on_validation_start),
                                            M_FIELD(on_validation_epoch_start),
                                            M_FIELD(on_validation_batch_start),
                                            M_FIELD(on_validation_batch_end),
                                            M_FIELD(on_validation_epoch_end),
                                            M_FIELD(on_validation_end),
                                            M_FIELD(on_train_epoch_end),
                                            M_FIELD(on_train_end),
                                            M_FIELD(on_fit_end),
                                            M_FIELD(on_test_start),
                                            M_FIELD(on_test_epoch_start),
                                            M_FIELD(on_test_batch_start),
                                            M_FIELD(on_test_batch_end),
                                            M_FIELD(on_test_epoch_end),
                                            M_FIELD(on_test_end),
                                            M_FIELD(on_predict_start),
                                            M_FIELD(on_predict_epoch_start),
                                            M_FIELD(on_predict_batch_start),
                                            M_FIELD(on_predict_batch_end),
                                            M_FIELD(on_predict_epoch_end),
                                            M_FIELD(on_predict_end),
                                            M_FIELD(on_metrics),
                                            M_FIELD(on_record),
                                            M_FIELD(on_checkpoint_saved),
                                            M_FIELD(on_exception),
                                            M_FIELD(teardown)});
#undef M_FIELD
  const testing::TempDir dir;
  const auto records = testing::at_batch_end([&](TrainerControl& trainer) {
    trainer.log_text("text", "a");
    trainer.save_checkpoint(dir.path() / std::to_string(trainer.state().batch_idx));
  });
  TrainerOptions options = testing::quiet({.callbacks = {records, std::make_shared<Overrides>(&expected), lambda}});
  options.log_every_n_steps = 1;
  Trainer trainer(options);
  const auto module = make_module<testing::TinyModule>();
  trainer.fit(module, {.train = tiny_loader(12, 4), .val = tiny_loader(4, 4)});
  EXPECT_EQ(trainer.state().global_step, 1);  // the second of three batches skips the rest of the epoch
  trainer.validate(module, {.val = tiny_loader(4, 4)});
  trainer.test(module, {.test = tiny_loader(4, 4)});
  trainer.predict(module, {.predict = tiny_loader(4, 4)});
  EXPECT_THROW(trainer.fit(make_module<Failing>(), {.train = tiny_loader(4, 4)}), std::runtime_error);
  EXPECT_THAT(calls, ElementsAreArray(expected));
  EXPECT_EQ(std::set<std::string>(calls.begin(), calls.end()).size(), 38U);
  EXPECT_TRUE(lambda->wants_gradients());
  EXPECT_FALSE(LambdaCallback::make({})->wants_gradients());
}

}  // namespace
}  // namespace fulgur
