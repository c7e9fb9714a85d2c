// The page that fit leaves in its folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/core/callback.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::read_file;
using testing::tiny_loader;
using testing::TinyModule;

class RunReportTest : public ::testing::Test {
 protected:
  fs::path run() const { return root() / "runs/a"; }
  fs::path page() const { return run() / "report.html"; }
  const fs::path& root() const { return folder_.path(); }

  TrainerOptions options(TrainerOptions given = {}) const {
    given.accelerator = "cpu";
    if (!given.max_epochs) given.max_epochs = 1;
    given.default_root_dir = root().string();
    given.name = "a";
    given.log_every_n_steps = 1;
    given.enable_progress_bar = given.enable_model_summary = false;
    return given;
  }

  static void fit(const TrainerOptions& given) {
    Trainer trainer(given);
    trainer.fit(make_module<TinyModule>(), {.train = tiny_loader(), .val = tiny_loader()});
  }

 private:
  testing::TempDir folder_;
};

TEST_F(RunReportTest, ShowsMetricsCheckpointsAndTheProfile) {
  fit(options({.profiler = "simple"}));
  const std::string html = read_file(page());
  EXPECT_THAT(html, AllOf(HasSubstr("<h3>train_loss</h3>"), HasSubstr("<h3>val_loss</h3>"), HasSubstr("epoch=0-step=5"),
                          HasSubstr("profile-fit.txt"), HasSubstr("training_step")));
  EXPECT_THAT(html, HasSubstr("<td>5</td><td>0</td><td>4</td>"));  // rows, last epoch, last step
}

TEST_F(RunReportTest, ATestThatFollowsAddsItsMetrics) {
  Trainer trainer(options());
  const auto module = make_module<TinyModule>();
  trainer.fit(module, {.train = tiny_loader(), .val = tiny_loader()});
  EXPECT_THAT(read_file(page()), Not(HasSubstr("<h3>test_loss</h3>")));
  trainer.test(module, {.test = tiny_loader()});
  EXPECT_THAT(read_file(page()), AllOf(HasSubstr("<h3>train_loss</h3>"), HasSubstr("<h3>test_loss</h3>")));
}

// `program test --name=a` leaves a file of its own, and the run that resumes after it continues metrics.csv.
TEST_F(RunReportTest, ATestOfAnotherTrainerHidesNoTraining) {
  fit(options());
  Trainer(options()).test(make_module<TinyModule>(), {.test = tiny_loader()});
  EXPECT_TRUE(fs::exists(run() / "metrics-v1.csv"));
  fit(options({.max_epochs = 2, .ckpt_path = "last"}));
  EXPECT_FALSE(fs::exists(run() / "metrics-v2.csv"));
  const std::string html = read_file(page());
  EXPECT_THAT(html, AllOf(HasSubstr("<h3>train_loss</h3>"), HasSubstr("<h3>val_loss</h3>")));
  EXPECT_THAT(html, HasSubstr("<td>10</td><td>1</td><td>9</td>"));  // rows, last epoch, last step
}

TEST_F(RunReportTest, ATestWithoutFitWritesNone) {
  Trainer trainer(options());
  trainer.test(make_module<TinyModule>(), {.test = tiny_loader()});
  EXPECT_FALSE(fs::exists(page()));
}

TEST_F(RunReportTest, IsThereUnlessSettingsSayNo) {
  fit(options({.enable_report = false}));
  EXPECT_TRUE(fs::exists(run() / "metrics.csv"));
  EXPECT_FALSE(fs::exists(page()));
  fit(options({.logger = false}));
  fit(options({.fast_dev_run = 1}));
  EXPECT_FALSE(fs::exists(page()));
  EXPECT_TRUE(Trainer(options()).options().enable_report);
  EXPECT_FALSE(*Trainer(options({.logger = false})).options().enable_report);
}

TEST_F(RunReportTest, WhereNothingIsOfARunThereIsNone) {
  fit(options({.enable_checkpointing = false, .logger = false, .enable_report = true}));
  EXPECT_FALSE(fs::exists(root() / "runs"));
}

TEST_F(RunReportTest, ARunThatASignalEndsHasOneAndOneThatFailsHasNone) {
  const auto at_batch = [](auto body) {
    TrainerOptions given;
    given.callbacks = {testing::at_batch_end(body)};
    return given;
  };
  EXPECT_THROW(fit(options(at_batch([](TrainerControl&) { throw std::runtime_error("boom"); }))), std::runtime_error);
  EXPECT_FALSE(fs::exists(page()));
  EXPECT_THROW(fit(options(at_batch([](TrainerControl&) { std::raise(SIGTERM); }))), InterruptedError);
  EXPECT_TRUE(fs::exists(page()));
}

TEST_F(RunReportTest, APageThatCannotBeWrittenFailsNoRun) {
  fs::create_directories(page() / "not a file");
  ::testing::internal::CaptureStderr();
  fit(options());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("report.html is not written: "), HasSubstr(page().string())));
}

TEST_F(RunReportTest, AMetricsFileOfAnotherProgramFailsNoRun) {
  fs::create_directories(run());
  std::ofstream(run() / "metrics.csv") << "time,value\n1,2\n";
  ::testing::internal::CaptureStderr();
  fit(options({.logger = false, .enable_report = true}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("was not written by a CSVLogger"));
}

TEST_F(RunReportTest, RankZeroWritesIt) {
  testing::run_ranks(2, [&](World&) {
    TrainerOptions given = options({.strategy = "ddp", .devices = 2});
    fit(given);
  });
  EXPECT_THAT(read_file(page()), HasSubstr("<h3>train_loss</h3>"));
}

}  // namespace
}  // namespace fulgur
