// Barebones mode: training and nothing else. What it refuses is in bad_input_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>

#include "fulgur/base/seed.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/counting_module.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using testing::CountingModule;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::tiny_loader;

TEST(Barebones, TurnsEveryExtraOff) {
  const Trainer trainer({.accelerator = "cpu", .max_epochs = 1, .barebones = true});
  EXPECT_THAT(trainer.options().callbacks, IsEmpty());
  EXPECT_EQ(trainer.options().num_sanity_val_steps, 0);
}

TEST(Barebones, TakesExtrasThatAreTurnedOffAnyway) {
  EXPECT_NO_THROW(
      Trainer({.max_epochs = 1, .num_sanity_val_steps = 0, .enable_progress_bar = false, .barebones = true}));
}

TEST(Barebones, OptionsAsResolvedMakeAnother) {
  const Trainer trainer({.accelerator = "cpu", .max_epochs = 1, .barebones = true});
  EXPECT_NO_THROW(Trainer(trainer.options()));
}

TEST(Barebones, LogDoesNothingAndSaysSoOnce) {
  const testing::TempDir dir;
  Trainer trainer({.accelerator = "cpu", .max_epochs = 1, .default_root_dir = dir.path().string(), .barebones = true});
  const auto module = make_module<CountingModule>();
  ::testing::internal::CaptureStderr();
  trainer.fit(module, {.train = tiny_loader(), .val = tiny_loader()});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("log('train_loss') was called in barebones mode; values are dropped"));
  EXPECT_EQ(told.find("barebones"), told.rfind("barebones"));
  EXPECT_THAT(trainer.callback_metrics(), IsEmpty());
  EXPECT_THAT(trainer.validate(module, {.val = tiny_loader()}), IsEmpty());
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  EXPECT_EQ(module->sanity_checked, 0);
  EXPECT_EQ(module->validated, 5 + 5);
}

TEST(Barebones, TrainsAsOtherwise) {
  std::vector<std::vector<double>> losses;
  for (const bool barebones : {false, true}) {
    seed_everything(1);
    TrainerOptions options{.accelerator = "cpu", .max_epochs = 2, .barebones = barebones};
    if (!barebones) options = testing::quiet(options);
    const auto module = make_module<CountingModule>();
    Trainer(options).fit(module, {.train = tiny_loader(40, 8)});
    losses.push_back(module->train_losses);
  }
  EXPECT_EQ(losses[0].size(), 10U);
  EXPECT_EQ(losses[0], losses[1]);
}

}  // namespace
}  // namespace fulgur
