// Loggers of a run that resumes from a checkpoint of another run, of a run that is interrupted where it has logged
// nothing yet, and of a second fit of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/seed.h"
#include "fulgur/callbacks/csv_logger.h"
#include "fulgur/callbacks/json_lines_logger.h"
#include "fulgur/callbacks/tensorboard_logger.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using testing::tiny_loader;
using testing::TinyModule;

TrainerOptions options_of(const fs::path& root, const std::string& name) {
  TrainerOptions options = testing::quiet({.max_epochs = 2});
  options.default_root_dir = root;
  options.name = name;
  options.enable_checkpointing = true;
  options.log_every_n_steps = 1;
  options.callbacks = {CSVLogger::make(), JsonLinesLogger::make(), TensorBoardLogger::make()};
  options.logger = true;
  return options;
}

// The files that the run has written as it went, but for its checkpoints, with their content.
std::map<std::string, std::string> files_of(const fs::path& run) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(run)) {
    const std::string name = fs::relative(entry.path(), run).string();
    if (!entry.is_regular_file() || name.starts_with("checkpoints") || name == "report.html") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[name] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

TEST(ResumedElsewhere, TheFilesOfTheOtherRunStayAsTheyAre) {
  const testing::TempDir dir;
  Trainer(options_of(dir.path(), "a")).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  Trainer(options_of(dir.path(), "b")).fit(make_module<TinyModule>(), {.train = tiny_loader(80)});
  const fs::path b = dir.path() / "runs/b";
  auto before = files_of(b);
  EXPECT_EQ(before.size(), 3U);
  for (const size_t num_files : {6, 9}) {  // the same command twice
    TrainerOptions options = options_of(dir.path(), "b");
    options.max_epochs = 3;
    options.ckpt_path = (dir.path() / "runs/a/checkpoints/last").string();
    Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader()});
    const auto after = files_of(b);
    EXPECT_EQ(after.size(), num_files);
    for (const auto& [name, content] : before) EXPECT_EQ(after.at(name), content) << name;
    before = after;
  }
  EXPECT_TRUE(before.contains("metrics-v2.csv"));
  EXPECT_TRUE(before.contains("metrics-v2.jsonl"));
}

TEST(ResumedElsewhere, AShorterFileOfTheOtherRunStaysAsItIs) {
  const testing::TempDir dir;
  Trainer(options_of(dir.path(), "a")).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  TrainerOptions one_epoch = options_of(dir.path(), "b");
  one_epoch.max_epochs = 1;
  Trainer(one_epoch).fit(make_module<TinyModule>(), {.train = tiny_loader(24)});
  const fs::path b = dir.path() / "runs/b";
  const auto before = files_of(b);
  TrainerOptions options = options_of(dir.path(), "b");
  options.max_epochs = 3;
  options.ckpt_path = (dir.path() / "runs/a/checkpoints/last").string();
  Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  const auto after = files_of(b);
  EXPECT_EQ(after.size(), 6U);
  EXPECT_TRUE(after.contains("metrics-v1.csv"));
  for (const auto& [name, content] : before) EXPECT_EQ(after.at(name), content) << name;
}

// Sends SIGTERM after an optimizer step, or within the validation after the step.
struct Signal {
  int64_t step;
  bool in_validation;
};
class SendsSignal final : public Callback {
 public:
  explicit SendsSignal(Signal signal) : signal_(signal) {}
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) override {
    if (!signal_.in_validation && trainer.state().global_step == signal_.step) std::raise(SIGTERM);
  }
  void on_validation_batch_end(TrainerControl& trainer, const Batch&, int64_t batch_idx) override {
    const bool is_here = batch_idx == 0 && trainer.state().global_step == signal_.step;
    if (signal_.in_validation && is_here) std::raise(SIGTERM);
  }

 private:
  const Signal signal_;
};

// The CSV files, by name, of a run of two epochs that each signal ends, and that the same command resumes after each.
std::map<std::string, std::string> csv_files(const fs::path& root, bool has_own_file,
                                             const std::vector<Signal>& signals) {
  fs::create_directories(root);
  for (size_t i = 0; i <= signals.size(); ++i) {
    TrainerOptions options = options_of(root, "a");
    options.log_every_n_steps = 50;  // there is a row for each epoch only
    options.callbacks = {CSVLogger::make({.file = has_own_file ? root / "own.csv" : fs::path()})};
    if (i < signals.size()) options.callbacks.push_back(std::make_shared<SendsSignal>(signals[i]));
    if (i > 0) options.ckpt_path = "last";
    seed_everything(1);
    Trainer trainer(options);
    const auto fit = [&] { trainer.fit(make_module<TinyModule>(), {.train = tiny_loader(), .val = tiny_loader()}); };
    if (i == signals.size()) {
      fit();
    } else {
      EXPECT_THROW(fit(), InterruptedError);
    }
  }
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.path().extension() == ".csv") files[entry.path().filename()] = testing::read_file(entry.path());
  }
  return files;
}

TEST(InterruptedLoggers, TheRowsAreThoseOfTheWholeRunInOneFile) {
  for (const bool has_own_file : {false, true}) {
    const testing::TempDir dir;
    const auto whole = csv_files(dir.path() / "whole", has_own_file, {});
    EXPECT_EQ(whole.size(), 1U);
    EXPECT_EQ(csv_files(dir.path() / "in_validation", has_own_file, {{.step = 10, .in_validation = true}}), whole);
    EXPECT_EQ(csv_files(dir.path() / "twice", has_own_file,
                        {{.step = 6, .in_validation = false}, {.step = 7, .in_validation = false}}),
              whole);
  }
}

// Fails in the second epoch until it is told not to.
struct Fails : TinyModule {
  bool fails = true;
  int64_t batches = 0;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (fails && ++batches == 8) throw std::runtime_error("as it should");
    return TinyModule::training_step(batch, batch_idx);
  }
};

// The oracle is a run that did not fail.
TEST(ResumedElsewhere, ASecondFitOfTheProcessWritesEachStepOnce) {
  const testing::TempDir dir;
  Trainer trainer(options_of(dir.path(), "a"));
  const auto module = make_module<Fails>();
  EXPECT_ANY_THROW(trainer.fit(module, {.train = tiny_loader()}));
  TrainerOptions options = options_of(dir.path(), "a");
  options.callbacks = trainer.options().callbacks;
  options.ckpt_path = "last";
  module->fails = false;
  Trainer(options).fit(module, {.train = tiny_loader()});
  Trainer(options_of(dir.path(), "whole")).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  const auto files = files_of(dir.path() / "runs/a"), whole = files_of(dir.path() / "runs/whole");
  const auto lines = [](const std::string& text) { return std::ranges::count(text, '\n'); };
  EXPECT_EQ(lines(files.at("metrics.csv")), lines(whole.at("metrics.csv")));
  EXPECT_EQ(lines(files.at("metrics.jsonl")), lines(whole.at("metrics.jsonl")));
  EXPECT_EQ(files.size(), 4U);  // a further event file
  size_t bytes = 0, bytes_of_whole = 0;
  for (const auto& [name, content] : files) bytes += name.starts_with("events") ? content.size() : 0;
  for (const auto& [name, content] : whole) bytes_of_whole += name.starts_with("events") ? content.size() : 0;
  EXPECT_LT(bytes, bytes_of_whole + 200);  // the version and the session start of the second file
}

TEST(ResumedElsewhere, LoggersOfASecondTrainerWriteIntoItsFolder) {
  const testing::TempDir dir;
  Trainer(options_of(dir.path(), "b")).fit(make_module<TinyModule>(), {.train = tiny_loader(80)});
  const auto of_an_earlier_run = files_of(dir.path() / "runs/b");
  Trainer first(options_of(dir.path(), "a"));
  first.fit(make_module<TinyModule>(), {.train = tiny_loader()});
  const auto of_first = files_of(dir.path() / "runs/a");
  TrainerOptions options = options_of(dir.path(), "b");
  options.callbacks = first.options().callbacks;
  Trainer(options).fit(make_module<TinyModule>(), {.train = tiny_loader()});
  EXPECT_EQ(files_of(dir.path() / "runs/a"), of_first);
  auto of_second = files_of(dir.path() / "runs/b");
  EXPECT_EQ(of_second.size(), 6U);
  for (const auto& [name, content] : of_an_earlier_run) EXPECT_EQ(of_second[name], content) << name;
  const auto lines = [](const std::string& text) { return std::ranges::count(text, '\n'); };
  EXPECT_EQ(lines(of_second["metrics-v1.csv"]), lines(of_first.at("metrics.csv")));
}

}  // namespace
}  // namespace fulgur
