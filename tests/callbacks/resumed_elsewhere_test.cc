// Loggers of a run that resumes from a checkpoint of another run, and of a second fit of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

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
