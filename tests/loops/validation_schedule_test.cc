// When fit validates. Expected are the numbers of training batches before each validation, counted by hand.
#include "fulgur/loops/validation_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "fulgur/core/callback.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/counting_module.h"
#include "tests/testing/unsized_loader.h"

namespace fulgur {
namespace {

using namespace std::chrono_literals;
using testing::CountingModule;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::quiet;
using testing::stop_at_batch;
using testing::tiny_loader;
using testing::UnsizedLoader;

constexpr auto kShortest = 1ns;  // over after every batch
constexpr auto kLong = 1h;       // longer than any test

std::vector<int64_t> validations(TrainerOptions options, std::shared_ptr<Loader> train) {
  const auto module = make_module<CountingModule>();
  Trainer(quiet(std::move(options))).fit(module, {.train = std::move(train), .val = tiny_loader(8, 8)});
  return module->validations;
}
std::vector<int64_t> validations(TrainerOptions options) {
  return validations(std::move(options), tiny_loader(40, 4));  // 10 batches
}

TEST(ValidationSchedule, IsTheEndOfTheEpochUnlessSaid) {
  EXPECT_THAT(validations({.max_epochs = 2}), ElementsAre(10, 20));
}

TEST(ValidationSchedule, AFractionOfTheEpochIsRoundedDownToBatches) {
  EXPECT_THAT(validations({.max_epochs = 2, .val_check_interval = Fraction(0.5)}), ElementsAre(5, 10, 15, 20));
  EXPECT_THAT(validations({.max_epochs = 2, .val_check_interval = Fraction(0.35)}), ElementsAre(3, 6, 9, 13, 16, 19));
}

TEST(ValidationSchedule, AFractionOfLessThanABatchIsOne) {
  EXPECT_THAT(validations({.limit_train_batches = Batches(3), .val_check_interval = Fraction(0.1)}),
              ElementsAre(1, 2, 3));
}

TEST(ValidationSchedule, AFractionIsOneOfTheBatchesThatAreRun) {
  EXPECT_THAT(validations({.limit_train_batches = Batches(4), .val_check_interval = Fraction(0.5)}), ElementsAre(2, 4));
}

TEST(ValidationSchedule, BatchesAreCountedInEachEpoch) {
  EXPECT_THAT(validations({.max_epochs = 2, .val_check_interval = Batches(4)}), ElementsAre(4, 8, 14, 18));
}

TEST(ValidationSchedule, BatchesNotStepsAreCounted) {
  EXPECT_THAT(validations({.max_epochs = 2, .val_check_interval = Batches(4), .accumulate_grad_batches = 2}),
              ElementsAre(4, 8, 14, 18));
}

TEST(ValidationSchedule, AValidationIsPutOffToTheEndOfItsAccumulationWindow) {
  EXPECT_THAT(validations({.val_check_interval = Batches(5), .accumulate_grad_batches = 2}), ElementsAre(6, 10));
  EXPECT_THAT(validations({.val_check_interval = Batches(1), .accumulate_grad_batches = 3}), ElementsAre(3, 6, 9, 10));
  EXPECT_THAT(validations({.val_check_interval = kShortest, .accumulate_grad_batches = 4}), ElementsAre(4, 8, 10));
}

TEST(ValidationSchedule, WithoutAnEpochToCheckBatchesAreCountedAcrossEpochs) {
  EXPECT_THAT(validations({.max_epochs = 3, .val_check_interval = Batches(7), .check_val_every_n_epoch = std::nullopt}),
              ElementsAre(7, 14, 21, 28));
  EXPECT_THAT(
      validations({.max_epochs = 3, .val_check_interval = Batches(25), .check_val_every_n_epoch = std::nullopt}),
      ElementsAre(25));
}

TEST(ValidationSchedule, EveryNEpochsTheIntervalCounts) {
  EXPECT_THAT(validations({.max_epochs = 4, .val_check_interval = Fraction(0.5), .check_val_every_n_epoch = 2}),
              ElementsAre(15, 20, 35, 40));
}

TEST(ValidationSchedule, ATimeIsLookedAtAfterEveryBatch) {
  EXPECT_THAT(validations({.limit_train_batches = Batches(3), .val_check_interval = kShortest}), ElementsAre(1, 2, 3));
  EXPECT_THAT(validations({.val_check_interval = kLong}), IsEmpty());
}

TEST(ValidationSchedule, ATimeCountsInTheEpochsThatAreChecked) {
  EXPECT_THAT(validations({.max_epochs = 2,
                           .limit_train_batches = Batches(2),
                           .val_check_interval = kShortest,
                           .check_val_every_n_epoch = 2}),
              ElementsAre(3, 4));
  EXPECT_THAT(validations({.max_epochs = 2,
                           .limit_train_batches = Batches(2),
                           .val_check_interval = kShortest,
                           .check_val_every_n_epoch = std::nullopt}),
              ElementsAre(1, 2, 3, 4));
}

TEST(ValidationSchedule, ATimeGoesOnWhenTheLoadersAreMadeAnew) {
  struct StopAtValidation : Callback {
    void on_validation_start(TrainerControl& trainer) override { trainer.request_stop("this was it"); }
  };
  TrainerOptions options{.max_time = 10s,
                         .val_check_interval = 20ms,  // takes many epochs
                         .num_sanity_val_steps = 0,
                         .reload_dataloaders_every_n_epochs = 1};
  options.callbacks = {std::make_shared<StopAtValidation>()};
  Trainer trainer(quiet(options));
  const auto module = make_module<CountingModule>();
  trainer.fit(module, {.train = tiny_loader(4, 4), .val = tiny_loader(8, 8)});
  EXPECT_EQ(module->validations.size(), 1U);
}

TEST(ValidationSchedule, AStreamIsValidatedAtItsEndAndByBatchesOrTime) {
  const auto stream = UnsizedLoader::make(tiny_loader(40, 4));
  EXPECT_THAT(validations({.max_epochs = 2}, stream), ElementsAre(10, 20));
  EXPECT_THAT(validations({.max_epochs = 2, .val_check_interval = Batches(4)}, stream), ElementsAre(4, 8, 14, 18));
  EXPECT_THAT(validations({.limit_train_batches = Batches(3)}, stream), ElementsAre(3));
  EXPECT_THAT(validations({.limit_train_batches = Batches(2), .val_check_interval = kShortest}, stream),
              ElementsAre(1, 2));
}

TEST(ValidationSchedule, AnEndInTheMiddleOfAnEpochIsValidated) {
  EXPECT_THAT(validations({.max_epochs = 2, .callbacks = {stop_at_batch(13)}}), ElementsAre(10, 13));
  EXPECT_THAT(validations({.max_steps = 13}), ElementsAre(10, 13));
}

TEST(ValidationSchedule, AnEndInAnEpochThatIsNotCheckedIsNot) {
  EXPECT_THAT(validations({.max_epochs = 2, .check_val_every_n_epoch = 2, .callbacks = {stop_at_batch(3)}}), IsEmpty());
}

TEST(ValidationSchedule, AnEndWhereValidationIsDueIsValidatedOnce) {
  EXPECT_THAT(validations({.max_steps = 4, .val_check_interval = Batches(4)}), ElementsAre(4));
  struct StopAfterValidation : Callback {
    void on_validation_end(TrainerControl& trainer) override {
      if (!trainer.state().sanity_checking) trainer.request_stop("no longer better");
    }
  };
  EXPECT_THAT(validations({.val_check_interval = Batches(4), .callbacks = {std::make_shared<StopAfterValidation>()}}),
              ElementsAre(4));
}

TEST(ValidationSchedule, AStopThatMustWaitDoesNotValidateEveryBatch) {
  EXPECT_THAT(validations({.max_epochs = 3, .min_epochs = 2, .callbacks = {stop_at_batch(1)}}), ElementsAre(10, 20));
}

}  // namespace
}  // namespace fulgur
