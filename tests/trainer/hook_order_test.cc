// The order in which hooks fire, written by hand from Lightning's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/callback.h"
#include "tests/testing/tiny.h"
#include "trainer/trainer.h"

namespace fulgur {
namespace {

using ::testing::ElementsAreArray;
using testing::TinyModule;
using Calls = std::vector<std::string>;

#define RECORD(hook) \
  void hook() override { calls->push_back("M." #hook); }
#define RECORD_BATCH(hook) \
  void hook(const Batch&, int64_t) override { calls->push_back("M." #hook); }

struct RecordingModule : TinyModule {
  explicit RecordingModule(Calls* recorded) : calls(recorded) {}
  Calls* calls;

  RECORD(prepare_data)
  void setup(EntryPoint) override { calls->push_back("M.setup"); }
  Optimizers configure_optimizers() override {
    calls->push_back("M.configure_optimizers");
    return TinyModule::configure_optimizers();
  }
  RECORD(on_fit_start)
  RECORD(on_train_start)
  RECORD(on_train_epoch_start)
  RECORD_BATCH(on_train_batch_start)
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    calls->push_back("M.training_step");
    return TinyModule::training_step(batch, batch_idx);
  }
  RECORD(on_before_zero_grad)
  void on_before_backward(const at::Tensor&) override { calls->push_back("M.on_before_backward"); }
  RECORD(on_after_backward)
  RECORD(on_before_optimizer_step)
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
    calls->push_back("M.on_train_batch_end");
  }
  RECORD(on_validation_start)
  RECORD(on_validation_epoch_start)
  RECORD_BATCH(on_validation_batch_start)
  RECORD_BATCH(validation_step)
  RECORD_BATCH(on_validation_batch_end)
  RECORD(on_validation_epoch_end)
  RECORD(on_validation_end)
  RECORD(on_train_epoch_end)
  RECORD(on_train_end)
  RECORD(on_fit_end)
  RECORD(on_test_start)
  RECORD(on_test_epoch_start)
  RECORD_BATCH(on_test_batch_start)
  RECORD_BATCH(test_step)
  RECORD_BATCH(on_test_batch_end)
  RECORD(on_test_epoch_end)
  RECORD(on_test_end)
  RECORD(on_predict_start)
  RECORD(on_predict_epoch_start)
  RECORD_BATCH(on_predict_batch_start)
  Batch predict_step(const Batch&, int64_t) override {
    calls->push_back("M.predict_step");
    return {};
  }
  void on_predict_batch_end(const Batch&, const Batch&, int64_t) override {
    calls->push_back("M.on_predict_batch_end");
  }
  RECORD(on_predict_epoch_end)
  RECORD(on_predict_end)
  void teardown(EntryPoint) override { calls->push_back("M.teardown"); }
};

#undef RECORD
#undef RECORD_BATCH

// Records a few hooks of its own, to show who comes first.
class RecordingCallback : public Callback {
 public:
  RecordingCallback(Calls* calls, std::string name, bool last = false)
      : calls_(calls), name_(std::move(name)), last_(last) {}
  bool runs_last() const override { return last_; }
  void setup(TrainerControl&, EntryPoint) override { record("setup"); }
  void on_train_start(TrainerControl&) override { record("on_train_start"); }
  void on_train_batch_end(TrainerControl&, const at::Tensor&, const Batch&, int64_t) override {
    record("on_train_batch_end");
  }
  void on_validation_end(TrainerControl&) override { record("on_validation_end"); }
  void on_train_epoch_end(TrainerControl&) override { record("on_train_epoch_end"); }
  void teardown(TrainerControl&, EntryPoint) override { record("teardown"); }

 private:
  void record(const std::string& hook) { calls_->push_back(name_ + "." + hook); }
  Calls* calls_;
  std::string name_;
  bool last_;
};

const Calls kTrainBatch{"M.on_train_batch_start", "M.training_step",     "M.on_before_zero_grad",
                        "M.on_before_backward",   "M.on_after_backward", "M.on_before_optimizer_step"};
const Calls kValidation{"M.on_validation_start", "M.on_validation_epoch_start", "M.on_validation_batch_start",
                        "M.validation_step",     "M.on_validation_batch_end",   "M.on_validation_epoch_end"};

Calls join(std::initializer_list<Calls> parts) {
  Calls all;
  for (const Calls& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(HookOrder, Fit) {
  Calls calls;
  TrainerOptions options = testing::quiet({.max_epochs = 2});
  options.callbacks = {std::make_shared<RecordingCallback>(&calls, "last", true),
                       std::make_shared<RecordingCallback>(&calls, "A"),
                       std::make_shared<RecordingCallback>(&calls, "B")};
  Trainer(options).fit(make_module<RecordingModule>(&calls),
                       {.train = testing::tiny_loader(8, 4), .val = testing::tiny_loader(4, 4)});
  const auto all = [](const std::string& hook) { return Calls{"A." + hook, "B." + hook, "last." + hook, "M." + hook}; };
  const Calls batch = join({kTrainBatch, all("on_train_batch_end")});
  const Calls epoch =
      join({{"M.on_train_epoch_start"},
            batch,
            batch,
            kValidation,
            all("on_validation_end"),
            {"A.on_train_epoch_end", "B.on_train_epoch_end", "M.on_train_epoch_end", "last.on_train_epoch_end"}});
  EXPECT_THAT(calls, ElementsAreArray(join({{"M.prepare_data"},
                                            all("setup"),
                                            {"M.configure_optimizers", "M.on_fit_start"},
                                            all("on_train_start"),
                                            epoch,
                                            epoch,
                                            {"M.on_train_end", "M.on_fit_end"},
                                            all("teardown")})));
}

TEST(HookOrder, Validate) {
  Calls calls;
  Trainer(testing::quiet()).validate(make_module<RecordingModule>(&calls), {.val = testing::tiny_loader(4, 4)});
  EXPECT_THAT(calls, ElementsAreArray(
                         join({{"M.prepare_data", "M.setup"}, kValidation, {"M.on_validation_end", "M.teardown"}})));
}

TEST(HookOrder, Test) {
  Calls calls;
  Trainer(testing::quiet()).test(make_module<RecordingModule>(&calls), {.test = testing::tiny_loader(4, 4)});
  EXPECT_THAT(calls, ElementsAreArray({"M.prepare_data", "M.setup", "M.on_test_start", "M.on_test_epoch_start",
                                       "M.on_test_batch_start", "M.test_step", "M.on_test_batch_end",
                                       "M.on_test_epoch_end", "M.on_test_end", "M.teardown"}));
}

TEST(HookOrder, Predict) {
  Calls calls;
  Trainer(testing::quiet()).predict(make_module<RecordingModule>(&calls), {.predict = testing::tiny_loader(4, 4)});
  EXPECT_THAT(calls, ElementsAreArray({"M.prepare_data", "M.setup", "M.on_predict_start", "M.on_predict_epoch_start",
                                       "M.on_predict_batch_start", "M.predict_step", "M.on_predict_batch_end",
                                       "M.on_predict_epoch_end", "M.on_predict_end", "M.teardown"}));
}

}  // namespace
}  // namespace fulgur
