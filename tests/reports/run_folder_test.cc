#include "fulgur/reports/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

class RunFolderTest : public ::testing::Test {
 protected:
  fs::path runs() const { return folder_.path() / "runs"; }

  void write(const fs::path& file, const std::string& text) const {
    fs::create_directories((runs() / file).parent_path());
    std::ofstream(runs() / file, std::ios::binary) << text;
  }

  // A checkpoint of 1024 bytes, whose state says what ModelCheckpoint knows of it and of others.
  void write_checkpoint(const std::string& name, int64_t step, const std::string& saved) const {
    const fs::path folder = fs::path("a/checkpoints") / name;
    write(folder / "manifest.json",
          R"({"format_version": 1, "world_size": 1, "files": [)"
          R"({"name": "model.safetensors", "num_bytes": 1000, "xxh3": "0000000000000000"},)"
          R"({"name": "state.json", "num_bytes": 24, "xxh3": "0000000000000000"}], "parameters": [], "ranges": []})");
    write(folder / "state.json", "{\"loops/global_step\": " + std::to_string(step) + saved + "}");
  }

  // As if the file had been written after all others: the clock of a file system is coarse.
  void make_newer(const fs::path& file) const {
    fs::last_write_time(runs() / file, fs::file_time_type::clock::now() + std::chrono::hours(1));
  }

  std::string refusal(const fs::path& run) const {
    return message_of<UsageError>([&] { read_run_folder(runs() / run); });
  }

 private:
  testing::TempDir folder_;
};

TEST_F(RunFolderTest, ReadsEachPart) {
  write("a/metrics.csv", "epoch,step,loss\n0,9,0.5\n");
  write("a/config.toml", "seed = 1\n[trainer]\nmax_epochs = 3\n[[callbacks]]\ntype = \"EarlyStopping\"\n");
  write("a/env.json", R"({"host": "here", "git_commit": null, "world_size": 2})");
  const RunFolder run = read_run_folder(runs() / "a/");
  EXPECT_EQ(run.name, (runs() / "a").string());
  EXPECT_EQ(run.metrics.num_rows, 1);
  EXPECT_EQ(run.config.at("trainer.max_epochs"), "3");
  EXPECT_EQ(run.config.at("callbacks[0].type"), "EarlyStopping");
  EXPECT_THAT(run.environment,
              ElementsAre(std::pair("host", "here"), std::pair("git_commit", ""), std::pair("world_size", "2")));
  EXPECT_EQ(*run.find_environment("host"), "here");
  EXPECT_EQ(run.find_environment("nothing"), nullptr);
  EXPECT_THAT(run.notes, IsEmpty());
}

TEST_F(RunFolderTest, CheckpointsHaveSizesAndTheNewestScores) {
  const std::string callback = ", \"callbacks/ModelCheckpoint{monitor=val_loss}/";
  write_checkpoint("epoch=0-step=10", 10,
                   callback + "monitor\": \"val_loss\"" + callback + "saved/0/name\": \"epoch=0-step=10\"" + callback +
                       "saved/0/score\": 0.75");
  write_checkpoint("epoch=1-step=9", 9, "");
  write_checkpoint("epoch=1-step=20", 20,
                   callback + "monitor\": \"val_loss\"" + callback + "saved/0/name\": \"epoch=1-step=20\"" + callback +
                       "saved/0/score\": {\"double\": \"nan\"}" + callback + "saved/1/name\": \"epoch=0-step=10\"" +
                       callback + "saved/1/score\": 0.5");
  fs::create_directory_symlink("epoch=1-step=20", runs() / "a/checkpoints/last");
  fs::create_directory_symlink("epoch=0-step=10", runs() / "a/checkpoints/best");
  const RunFolder run = read_run_folder(runs() / "a");
  ASSERT_EQ(run.checkpoints.size(), 3u);
  EXPECT_EQ(run.checkpoints[0].step, 9);
  EXPECT_FALSE(run.checkpoints[0].score);
  const CheckpointSummary &best = run.checkpoints[1], &last = run.checkpoints[2];
  EXPECT_EQ(best.name, "epoch=0-step=10");
  EXPECT_EQ(best.num_bytes, 1024);
  EXPECT_EQ(best.monitor, "val_loss");
  EXPECT_EQ(best.score, 0.5);
  EXPECT_TRUE(best.is_best && !best.is_last);
  EXPECT_TRUE(std::isnan(*last.score));
  EXPECT_TRUE(last.is_last && !last.is_best);
}

TEST_F(RunFolderTest, ADeeplyNestedEnvironmentIsRefused) {
  write("a/config.toml", "seed = 1\n");
  constexpr size_t kDepth = 500'000;  // the stack holds fewer calls
  write("a/env.json", "{\"host\": " + std::string(kDepth, '[') + std::string(kDepth, ']') + "}");
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_THAT(run.environment, IsEmpty());
  EXPECT_THAT(run.notes, Contains("env.json: nested more than 16 deep"));
}

TEST_F(RunFolderTest, SizesThatOverflowAreCutToTheLargestNumber) {
  write("a/checkpoints/large/manifest.json",
        R"({"format_version": 1, "world_size": 1, "files": [)"
        R"({"name": "model.safetensors", "num_bytes": 9223372036854775807, "xxh3": "0000000000000000"},)"
        R"({"name": "state.json", "num_bytes": 24, "xxh3": "0000000000000000"}], "parameters": [], "ranges": []})");
  write("a/checkpoints/large/state.json", "{\"loops/global_step\": 1}");
  const RunFolder run = read_run_folder(runs() / "a");
  ASSERT_EQ(run.checkpoints.size(), 1u);
  EXPECT_EQ(run.checkpoints[0].num_bytes, std::numeric_limits<int64_t>::max());
}

TEST_F(RunFolderTest, TheNewestFilesOfAFolderAreRead) {
  for (const std::string version : {"", "-v1", "-v2"}) {
    write("a/metrics" + version + ".csv", "epoch,step,loss" + version + "\n0,1,2\n");
    write("a/config" + version + ".toml", "name = \"run" + version + "\"");
    write("a/env" + version + ".json", "{\"host\": \"host" + version + "\"}");
  }
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_NE(run.metrics.find("loss-v2"), nullptr);
  EXPECT_EQ(run.config.at("name"), "run-v2");
  EXPECT_EQ(*run.find_environment("host"), "host-v2");
  EXPECT_THAT(run.notes, ElementsAre(HasSubstr("metrics-v2.csv is shown")));
}

// A run that resumes continues the file of its first part, whichever runs have begun in the folder meanwhile.
TEST_F(RunFolderTest, TheMetricsThatWereWrittenLastAreRead) {
  write("a/metrics.csv", "epoch,step,loss\n0,1,2\n");
  write("a/metrics-v1.csv", "epoch,step,loss-v1\n0,1,2\n");
  write("a/metrics-v2.csv", "epoch,step,loss-v2\n0,1,2\n");
  make_newer("a/metrics.csv");
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_NE(run.metrics.find("loss"), nullptr);
  EXPECT_THAT(run.notes, ElementsAre("metrics.csv is shown, which the newest run in this folder has written"));
  fs::remove(runs() / "a/metrics.csv");
  EXPECT_NE(read_run_folder(runs() / "a").metrics.find("loss-v2"), nullptr);
}

// A Trainer that only tests a checkpoint counts neither steps nor epochs.
TEST_F(RunFolderTest, AnEvaluationHidesNoTraining) {
  write("a/metrics.csv", "epoch,step,loss\n0,1,2\n");
  write("a/metrics-v1.csv", "epoch,step,test_acc,test_loss\n0,0,0.5,\n0,50,0.5,\n0,0,0.75,0.25\n");
  make_newer("a/metrics-v1.csv");
  ProgressReader reader(runs() / "a");
  const auto expect_training = [&](const RunFolder& run, int64_t num_rows) {
    EXPECT_EQ(run.metrics_file, runs() / "a/metrics.csv");
    EXPECT_EQ(run.metrics.num_rows, num_rows);
    EXPECT_THAT(run.notes, ElementsAre("metrics.csv is shown; metrics-v1.csv was written later and ends at step 0, as "
                                       "an evaluation does: test_acc 0.75, test_loss 0.25"));
  };
  expect_training(read_run_folder(runs() / "a"), 1);
  expect_training(reader.read(), 1);
  write("a/metrics.csv", "epoch,step,loss\n0,1,2\n0,2,1\n");
  make_newer("a/metrics-v1.csv");
  expect_training(reader.read(), 2);
}

// The rows of such a fit are at step 0, as those of an evaluation are.
TEST_F(RunFolderTest, AnEvaluationHidesNoFitOfOneStep) {
  for (const std::string metric : {"train_loss", "train/samples_per_sec", "lr-AdamW", "grad_norm"}) {
    write("a/metrics.csv", "epoch,step," + metric + ",val_loss\n0,0,2,0.5\n");
    write("a/metrics-v1.csv", "epoch,step,test_loss\n0,0,0.25\n");
    make_newer("a/metrics-v1.csv");
    EXPECT_EQ(read_run_folder(runs() / "a").metrics_file, runs() / "a/metrics.csv") << metric;
  }
}

TEST_F(RunFolderTest, AnEvaluationIsReadWhereNothingWasTrained) {
  write("a/metrics.csv", "epoch,step,test_acc\n0,0,0.5\n");
  write("a/metrics-v1.csv", "epoch,step,test_acc\n0,0,0.75\n");
  write("a/metrics-v2.csv", "epoch,st");
  make_newer("a/metrics-v1.csv");
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_EQ(run.metrics_file, runs() / "a/metrics-v1.csv");
  EXPECT_EQ(run.metrics.num_rows, 1);
}

TEST_F(RunFolderTest, WhatIsIncompleteIsNoted) {
  write("a/metrics.csv", "epoch,step,loss\n0,9,0.5\n0,1");
  write("a/config.toml", "seed = \n");
  write("a/env.json", "{\"host\": ");
  write("a/checkpoints/broken/manifest.json", "{");
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_EQ(run.metrics.num_rows, 1);
  EXPECT_THAT(run.notes, ElementsAre("the last row of metrics.csv is incomplete, and is left out",
                                     HasSubstr("config.toml:1:8: this is no TOML"), HasSubstr("env.json: byte"),
                                     HasSubstr("broken/manifest.json")));
}

TEST_F(RunFolderTest, ARunThatHasLoggedNothingYetIsRead) {
  write("a/config.toml", "seed = 1\n");
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_TRUE(run.metrics_file.empty());
  EXPECT_THAT(run.notes, ElementsAre("there is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere"));
}

TEST_F(RunFolderTest, AFileOfARunIsEnoughEvenIfNothingCanBeReadFromIt) {
  const auto is_without_metrics = HasSubstr("there is no metrics.csv");
  fs::create_directories(runs() / "a/checkpoints");
  EXPECT_THAT(read_run_folder(runs() / "a").notes, ElementsAre(is_without_metrics));
  EXPECT_THAT(ProgressReader(runs() / "a").read().notes, ElementsAre(is_without_metrics));
  write("b/config.toml", "seed = \n");
  EXPECT_THAT(read_run_folder(runs() / "b").notes, ElementsAre(is_without_metrics, HasSubstr("this is no TOML")));
  EXPECT_THAT(ProgressReader(runs() / "b").read().notes, ElementsAre(is_without_metrics));
}

TEST_F(RunFolderTest, WhatAnotherVersionWroteIsReadAsFarAsItIsKnown) {
  write("a/metrics.csv", "epoch,step,loss\n0,9,0.5\n");
  write("a/config.toml", "seed = 1\n[of_the_future]\nlevel = 3\n");
  write("a/env.json", R"({"host": "here", "of_the_future": {"levels": [1, {"two": null}]}, "world_size": 2})");
  write_checkpoint("known", 10, ", \"of_the_future/level\": 3");
  write_checkpoint("unknown", 20, "");
  write("a/checkpoints/unknown/manifest.json", R"({"format_version": 99, "parts": {"of_the_future": 3}})");
  const RunFolder run = read_run_folder(runs() / "a");
  EXPECT_EQ(run.metrics.num_rows, 1);
  EXPECT_EQ(run.config.at("seed"), "1");
  EXPECT_EQ(run.config.at("of_the_future.level"), "3");
  EXPECT_THAT(run.environment,
              ElementsAre(std::pair("host", "here"), std::pair("of_the_future", R"({"levels":[1,{"two":null}]})"),
                          std::pair("world_size", "2")));
  ASSERT_EQ(run.checkpoints.size(), 1u);
  EXPECT_EQ(run.checkpoints[0].step, 10);
  EXPECT_THAT(run.notes,
              ElementsAre(AllOf(HasSubstr("checkpoints/unknown/manifest.json"), HasSubstr("has format version 99"))));
}

TEST_F(RunFolderTest, WhatIsNoRunIsRefusedWithWhatThereIs) {
  write("first/metrics.csv", "epoch,step\n");
  write("second/metrics.csv", "step,epoch\n1,2\n");
  const std::string root = runs().string();
  EXPECT_EQ(refusal("frist"), "there is no folder '" + root + "/frist'; did you mean '" + root + "/first'? '" + root +
                                  "' has first, second");
  EXPECT_EQ(refusal("frist/"), refusal("frist"));
  EXPECT_THAT(refusal("nowhere/a"), HasSubstr("there is no folder '" + root + "/nowhere' either"));
  EXPECT_THAT(refusal("first/metrics.csv"),
              HasSubstr("is no folder; give the folder of a run, such as runs/version_0"));
  EXPECT_EQ(refusal("."), "'" + root +
                              "/.' is no folder of a run: it has no metrics.csv, config.toml, env.json or "
                              "checkpoints; '" +
                              root + "/.' has first, second");
  EXPECT_THAT(refusal("second"), HasSubstr("second/metrics.csv' was not written by a CSVLogger"));
}

TEST_F(RunFolderTest, ProgressLeavesOutConfigAndCheckpoints) {
  write("a/metrics.csv", "epoch,step,loss\n0,9,0.5\n");
  write("a/config.toml", "seed = \n");
  write("a/env.json", R"({"host": "here"})");
  const RunFolder run = ProgressReader(runs() / "a").read();
  EXPECT_EQ(run.metrics.num_rows, 1);
  EXPECT_EQ(*run.find_environment("host"), "here");
  EXPECT_THAT(run.config, IsEmpty());
  EXPECT_THAT(run.notes, IsEmpty());
}

TEST_F(RunFolderTest, ProgressFollowsTheRunAndReadsWhatIsNew) {
  std::string rows = "epoch,step,loss\n";
  for (int i = 0; i < 1000; ++i) rows += "0," + std::to_string(i) + ",0.5\n";
  write("a/metrics.csv", rows);
  ProgressReader reader(runs() / "a");
  EXPECT_EQ(reader.read().metrics.num_rows, 1000);
  EXPECT_EQ(reader.num_metric_bytes(), static_cast<int64_t>(rows.size()));
  write("a/metrics.csv", rows + "0,1000,0.25\n");
  EXPECT_EQ(reader.read().metrics.find("loss")->points.back().value, 0.25);
  EXPECT_LT(reader.num_metric_bytes(), 40);
  write("a/metrics-v1.csv", "epoch,step,accuracy\n0,3,1\n");
  EXPECT_EQ(reader.read().metrics.num_rows, 1);
  EXPECT_EQ(reader.read().metrics.find("loss"), nullptr);
}

TEST_F(RunFolderTest, TablesOfProfilersAreRead) {
  write("a/metrics.csv", "epoch,step,loss\n0,9,0.5\n");
  write("a/trace-rank0.txt", "operators\n");
  write("a/trace-rank0.json", "[]");
  write("a/profile-fit.txt", "spans\n");
  write("a/log.txt", "loss 0.5\n");
  EXPECT_THAT(read_run_folder(runs() / "a").profiles,
              ElementsAre(std::pair("profile-fit.txt", "spans\n"), std::pair("trace-rank0.txt", "operators\n")));
}

TEST_F(RunFolderTest, TheNewestTableOfEachProfilerIsRead) {
  for (const char* name : {"profile-fit", "profile-fit-v2", "profile-fit-v10", "profile-validate", "trace-rank0-v1"}) {
    write(fs::path("a") / (std::string(name) + ".txt"), name);
  }
  write("a/metrics.csv", "epoch,step,loss\n0,9,0.5\n");
  EXPECT_THAT(read_run_folder(runs() / "a").profiles, ElementsAre(std::pair("profile-fit-v10.txt", "profile-fit-v10"),
                                                                  std::pair("profile-validate.txt", "profile-validate"),
                                                                  std::pair("trace-rank0-v1.txt", "trace-rank0-v1")));
}

TEST_F(RunFolderTest, OnlyWhatARunWritesMakesAFolderARuns) {
  write("a/report.html", "");
  EXPECT_FALSE(is_run_folder(runs() / "a"));
  EXPECT_FALSE(is_run_folder(runs() / "none"));
  write("a/env.json", "{}");
  EXPECT_TRUE(is_run_folder(runs() / "a"));
}

}  // namespace
}  // namespace fulgur
