#include "fulgur/callbacks/early_stopping.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/fake_trainer_control.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

class EarlyStoppingTest : public ::testing::Test {
 protected:
  testing::TempDir dir;
  testing::FakeTrainerControl trainer{dir.path()};

  // Validates once for each value until the callback requests a stop; returns how often.
  int64_t validations(EarlyStopping& stopping, const std::vector<double>& values) {
    int64_t count = 0;
    for (const double value : values) {
      trainer.log_epoch(Stage::validate, {{"val", value}});
      stopping.on_validation_end(trainer);
      ++count;
      if (!trainer.stop_reasons.empty()) break;
    }
    return count;
  }
  int64_t validations(EarlyStopping::Options options, const std::vector<double>& values) {
    trainer.stop_reasons.clear();
    options.monitor = "val";
    EarlyStopping stopping(options);
    stopping.setup(trainer, EntryPoint::fit);
    return validations(stopping, values);
  }
};

TEST_F(EarlyStoppingTest, StopsAfterAsManyChecksInARowWithoutImprovement) {
  EXPECT_EQ(validations({.patience = 2}, {5, 4, 4.5, 4.2, 3}), 4);
  EXPECT_THAT(trainer.stop_reasons, ElementsAre("'val' has not improved on 4 in 2 validations (mode = min)"));
  EXPECT_EQ(validations({.patience = 2}, {5, 5.5, 4, 4.5, 3, 3.5}), 6);
  EXPECT_THAT(trainer.stop_reasons, IsEmpty());
  EXPECT_EQ(validations({.mode = "MAX", .patience = 1}, {0.5, 0.6, 0.6, 0.9}), 3);  // an equal value is none
  EXPECT_THAT(trainer.stop_reasons, ElementsAre("'val' has not improved on 0.6 in 1 validation (mode = max)"));
}

TEST_F(EarlyStoppingTest, AnImprovementIsLargerThanMinDelta) {
  EXPECT_EQ(validations({.patience = 2, .min_delta = 0.5}, {4, 3.6, 3.5, 0}), 3);
  EXPECT_THAT(trainer.stop_reasons,
              ElementsAre("'val' has not improved on 4 by more than 0.5 in 2 validations (mode = min)"));
  EXPECT_EQ(validations({.mode = "max", .patience = 1, .min_delta = 0.5}, {1, 1.75, 2, 9}), 3);
}

TEST_F(EarlyStoppingTest, StopsAtThresholds) {
  EXPECT_EQ(validations({.stopping_threshold = 0.1}, {0.3, 0.1, 0.05}), 3);
  EXPECT_THAT(trainer.stop_reasons,
              ElementsAre("'val' = 0.05 is better than the stopping_threshold 0.1 in validation 3"));
  EXPECT_EQ(validations({.divergence_threshold = 10.0}, {3, 10, 11}), 3);
  EXPECT_THAT(trainer.stop_reasons,
              ElementsAre("'val' = 11 is worse than the divergence_threshold 10 in validation 3"));
  EXPECT_EQ(validations({.mode = "max", .stopping_threshold = 0.9, .divergence_threshold = 0.1}, {0.5, 0.05}), 2);
}

TEST_F(EarlyStoppingTest, StopsAtWhatIsNotFinite) {
  EXPECT_EQ(validations({}, {kNan, 1}), 1);
  EXPECT_THAT(trainer.stop_reasons, ElementsAre("'val' is nan in validation 1"));
  EXPECT_EQ(validations({.mode = "max"}, {1, kInf}), 2);
  EXPECT_EQ(validations({.patience = 2, .check_finite = false}, {kNan, 3, kNan, kNan}), 4);
  EXPECT_THAT(trainer.stop_reasons, ElementsAre("'val' has not improved on 3 in 2 validations (mode = min)"));
  EXPECT_EQ(validations({.patience = 2, .check_finite = false}, {kNan, kNan}), 2);
}

TEST_F(EarlyStoppingTest, GoesOnWithTheCountsOfACheckpoint) {
  EarlyStopping::Options options{.monitor = "val", .patience = 3};
  EarlyStopping before(options);
  before.setup(trainer, EntryPoint::fit);
  validations(before, {2, 3, 3});
  EarlyStopping after(options);
  after.setup(trainer, EntryPoint::fit);
  after.load_state(before.state());
  after.on_fit_start(trainer);
  EXPECT_THAT(trainer.stop_reasons, IsEmpty());
  EXPECT_EQ(validations(after, {2.5, 1}), 1);

  options.patience = 4;  // the user has more patience now
  EarlyStopping patient(options);
  patient.load_state(after.state());
  trainer.stop_reasons.clear();
  patient.on_fit_start(trainer);
  EXPECT_THAT(trainer.stop_reasons, IsEmpty());
  options.patience = 3;
  EarlyStopping same(options);
  same.load_state(after.state());
  same.on_fit_start(trainer);
  EXPECT_THAT(trainer.stop_reasons, ElementsAre("'val' has not improved on 2 in 3 validations (mode = min)"));

  EarlyStopping other({.monitor = "train"});
  other.load_state(after.state());
  EXPECT_TRUE(std::isnan(other.best_score()));
}

TEST_F(EarlyStoppingTest, DoesNotCountTheSanityCheck) {
  EarlyStopping stopping({.monitor = "val", .patience = 1});
  trainer.run_state.sanity_checking = true;
  EXPECT_EQ(validations(stopping, {1, 2, 3}), 3);
  EXPECT_TRUE(std::isnan(stopping.best_score()));
}

// Logs `loss` from training and `accuracy` from validation, both 1 in every epoch.
struct Flat : testing::TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("loss", 1.0, {.on_step = true, .on_epoch = true});
    return TinyModule::training_step(batch, batch_idx);
  }
  void validation_step(const Batch&, int64_t) override { log("accuracy", 1.0); }
  void on_train_epoch_end() override { log("at_end", 1.0); }
};

int64_t epochs(const std::string& monitor, TrainerOptions options, bool validates = true) {
  options.max_epochs = 12;
  options.callbacks = {EarlyStopping::make({.monitor = monitor, .patience = 2})};
  Trainer trainer(testing::quiet(options));
  Loaders loaders{.train = testing::tiny_loader(16, 8)};
  if (validates) loaders.val = testing::tiny_loader(8, 8);
  trainer.fit(make_module<Flat>(), loaders);
  return trainer.state().epoch;
}

TEST(EarlyStoppingInARun, ChecksWhereTheMonitorIsLogged) {
  EXPECT_EQ(epochs("accuracy", {}), 3);
  EXPECT_EQ(epochs("accuracy", {.check_val_every_n_epoch = 3}), 9);
  EXPECT_EQ(epochs("accuracy", {.val_check_interval = Batches(1)}), 2);  // four validations in two epochs
  EXPECT_EQ(epochs("loss", {.val_check_interval = Batches(1)}), 3);
  EXPECT_EQ(epochs("loss", {}, /*validates=*/false), 3);
  EXPECT_EQ(epochs("at_end", {}), 3);
  EXPECT_EQ(epochs("accuracy", {.min_epochs = 5}), 5);
}

TEST(EarlyStoppingInARun, NamesTheMetricsThereAreIfNobodyLogsTheMonitor) {
  EXPECT_THAT(message_of<SetupError>([] { epochs("acuracy", {}); }),
              HasSubstr("EarlyStopping: unknown monitor 'acuracy'; did you mean 'accuracy'?"));
  EXPECT_THAT(message_of<SetupError>([] { epochs("val", {}, /*validates=*/false); }), HasSubstr("known: at_end, loss"));
}

TEST(EarlyStoppingInARun, IsLeftOutOfAFastDevRun) { EXPECT_EQ(epochs("nothing", {.fast_dev_run = 2}), 1); }

TEST(EarlyStopping, AValidationOutsideFitStopsNothing) {
  struct Stops : testing::TinyModule {
    void validation_step(const Batch& batch, int64_t) override {
      log("val_loss", loss(batch));
      if (in_validate) request_stop("enough");
    }
    bool in_validate = false;
  };
  const auto module = make_module<Stops>();
  Trainer trainer(testing::quiet({.max_epochs = 2, .callbacks = {EarlyStopping::make({.monitor = "val_loss"})}}));
  const Loaders loaders{.train = testing::tiny_loader(), .val = {testing::tiny_loader()}};
  trainer.fit(module, loaders);
  module->in_validate = true;
  for (int i = 0; i < 5; ++i) trainer.validate(module, {.val = {testing::tiny_loader()}});
  module->in_validate = false;
  trainer.fit(make_module<testing::TinyModule>(), loaders);
  EXPECT_EQ(trainer.state().global_step, 10);
}

TEST(EarlyStopping, RefusesOptionsThatCannotBeUsed) {
  const auto refusal = [](EarlyStopping::Options options) {
    return message_of<UsageError>([&] { EarlyStopping::make(options); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("monitor is empty"));
  EXPECT_THAT(refusal({.monitor = "a", .mode = "mini"}), HasSubstr("did you mean 'min'"));
  EXPECT_THAT(refusal({.monitor = "a", .patience = 0}), HasSubstr("patience must be at least 1; got 0"));
  EXPECT_THAT(refusal({.monitor = "a", .min_delta = -0.1}), HasSubstr("min_delta must be at least 0"));
}

TEST(EarlyStoppingInARun, DoesNotCheckAnEpochThatWasCut) {
  const testing::TempDir dir;
  const auto stopping = [] { return EarlyStopping::make({.monitor = "loss", .patience = 3}); };
  TrainerOptions options{.max_steps = 3, .default_root_dir = dir.path(), .name = "run"};
  const auto fit = [&] {
    options.callbacks = {stopping()};
    TrainerOptions all = testing::quiet(options);
    all.enable_checkpointing = true;
    Trainer trainer(all);
    trainer.fit(make_module<Flat>(), {.train = testing::tiny_loader(16, 8)});
    return trainer.state().epoch;
  };
  fit();  // an epoch and a half
  options.max_steps = -1;
  options.max_epochs = 12;
  options.ckpt_path = "last";
  EXPECT_EQ(fit(), 4);  // as a run that was not cut
}

}  // namespace
}  // namespace fulgur
