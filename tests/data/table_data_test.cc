#include "fulgur/data/tables/table_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fstream>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using testing::message_of;
using testing::TempDir;

std::filesystem::path write_rows(const std::filesystem::path& path, int begin, int end) {
  std::ofstream file(path);
  file << "x,y\n";
  for (int i = begin; i < end; ++i) file << i << ".5," << i % 2 << "\n";
  return path;
}

int64_t count_samples(Loader& loader) {
  int64_t count = 0;
  loader.begin_epoch(0);
  while (const auto batch = loader.next()) count += batch->batch_size();
  return count;
}

TEST(TableData, SplitsOneFileIntoPartsThatTrainingStandardizes) {
  const TempDir folder;
  TableData data({.path = write_rows(folder.path() / "a.csv", 0, 20), .test_fraction = 0.2, .schema = {.target = "y"}},
                 1);
  data.setup(EntryPoint::fit);
  EXPECT_EQ(count_samples(*data.train_dataloader()), 14);
  EXPECT_EQ(count_samples(*data.val_dataloader()[0]), 2);
  EXPECT_EQ(count_samples(*data.test_dataloader()[0]), 4);
  const auto train = data.train_dataloader();
  train->begin_epoch(0);
  EXPECT_NEAR(train->next()->operator[]("features").mean().item<double>(), 0, 1e-6);
}

TEST(TableData, PartsCanHaveFilesOfTheirOwn) {
  const TempDir folder;
  TableData data({.path = write_rows(folder.path() / "a.csv", 0, 20),
                  .val_path = write_rows(folder.path() / "b.csv", 20, 25),
                  .test_fraction = 0,
                  .schema = {.target = "y"}},
                 1);
  data.setup(EntryPoint::fit);
  EXPECT_EQ(count_samples(*data.train_dataloader()), 20);
  EXPECT_EQ(count_samples(*data.val_dataloader()[0]), 5);
  EXPECT_TRUE(data.test_dataloader().empty());
}

TEST(TableData, ACheckpointBringsWhatTrainingHasLearnt) {
  const TempDir folder;
  const auto options = [&](const std::filesystem::path& path) {
    return TableDataOptions{.path = path, .test_fraction = 0.5, .schema = {.target = "y"}};
  };
  TableData trained(options(write_rows(folder.path() / "a.csv", 0, 20)), 1);
  trained.setup(EntryPoint::fit);
  TableData other(options(write_rows(folder.path() / "b.csv", 100, 120)), 1);
  other.setup(EntryPoint::test);
  other.load_state(trained.state());
  const auto test = other.test_dataloader()[0];
  test->begin_epoch(0);
  EXPECT_GT(test->next()->operator[]("features").min().item<double>(), 5);  // far from the mean of training
}

std::filesystem::path write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path) << text;
  return path;
}

at::Tensor only_batch(LoaderList loaders, const std::string& name) {
  loaders[0]->begin_epoch(0);
  return loaders[0]->next()->operator[](name);
}

TEST(TableData, TextOfTrainingIsTextInFilesWhereItLooksLikeNumbers) {
  const TempDir folder;
  TableData data({.path = write_file(folder.path() / "a.csv", "k,y\n01,true\n02,false\nA,maybe\n"),
                  .val_path = write_file(folder.path() / "b.csv", "k,y\n02,true\n01,true\n"),
                  .test_path = write_file(folder.path() / "c.csv", "k,y\n2020-01-01,false\n01,true\n"),
                  .schema = {.target = "y"}},
                 1);
  data.setup(EntryPoint::fit);
  EXPECT_TRUE(only_batch(data.val_dataloader(), "category").equal(torch::tensor({{2}, {1}})));
  EXPECT_TRUE(only_batch(data.val_dataloader(), "label").equal(torch::tensor({2, 2})));
  EXPECT_TRUE(only_batch(data.test_dataloader(), "category").equal(torch::tensor({{0}, {1}})));
}

TEST(TableData, TextOfTheCheckpointIsTextInFilesWhereItLooksLikeNumbers) {
  const TempDir folder;
  const TableSchemaOptions schema{.categories = {"k"}, .target = "y"};
  const auto numbers = write_file(folder.path() / "b.csv", "k,y\n02,0\n01,1\n02,0\n02,1\n");
  TableData trained({.path = write_file(folder.path() / "a.csv", "k,y\n01,0\n02,1\nA,1\n"),
                     .val_fraction = 0,
                     .test_fraction = 0,
                     .schema = schema},
                    1);
  trained.setup(EntryPoint::fit);
  TableData other({.path = numbers, .test_path = numbers, .val_fraction = 0.5, .schema = schema}, 1);
  other.setup(EntryPoint::test);
  other.load_state(trained.state());
  EXPECT_TRUE(only_batch(other.test_dataloader(), "category").equal(torch::tensor({{2}, {1}, {2}, {2}})));
  EXPECT_TRUE(only_batch(other.val_dataloader(), "category").gt(0).all().item<bool>());
}

TEST(TableData, ErrorsNameTheFile) {
  const TempDir folder;
  const auto path = write_rows(folder.path() / "a.csv", 0, 20);
  TableData data({.path = path, .schema = {.target = "z"}}, 1);
  EXPECT_EQ(message_of<UsageError>([&] { data.setup(EntryPoint::fit); }),
            "'" + path.string() + "': unknown column 'z'; did you mean 'x'? known: x, y");
}

TEST(TableData, RefusesOptionsThatLeaveNothing) {
  EXPECT_EQ(message_of<UsageError>([] { TableData({}, 1); }),
            "TableData: there is no file; give its path with --data.path");
  TableData data({.path = "a.csv", .val_fraction = 0.5, .test_fraction = 0.5}, 1);
  EXPECT_EQ(message_of<UsageError>([&] { data.setup(EntryPoint::fit); }),
            "TableData: val_fraction (0.5) and test_fraction (0.5) leave no rows for training; lower them");
}

}  // namespace
}  // namespace fulgur
