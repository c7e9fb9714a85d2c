#include "fulgur/data/tables/table_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
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

std::set<float> rows_of(Loader& loader) {
  std::set<float> rows;
  loader.begin_epoch(0);
  while (const auto batch = loader.next()) {
    const at::Tensor x = (*batch)["x"];
    rows.insert(x.data_ptr<float>(), x.data_ptr<float>() + x.numel());
  }
  return rows;
}

class SplitOfACheckpoint : public ::testing::Test {
 protected:
  TableDataOptions options() const {
    return {.path = path_, .test_fraction = 0.2, .schema = {.tensors = {"x"}, .target = "y"}};
  }

  TableData trained(uint64_t seed) const {
    TableData data(options(), seed);
    data.setup(EntryPoint::fit);
    return data;
  }

  // What load_state() logs.
  static std::string load(TableData& data, const State& state) {
    ::testing::internal::CaptureStderr();
    data.load_state(state);
    return ::testing::internal::GetCapturedStderr();
  }

  TempDir folder_{};
  std::filesystem::path path_ = write_rows(folder_.path() / "a.csv", 0, 100);
};

TEST_F(SplitOfACheckpoint, NoRowOfTrainingIsTestedWhateverTheSeedIs) {
  TableData first = trained(7);
  TableData second(options(), 1);
  second.setup(EntryPoint::test);
  EXPECT_EQ(load(second, first.state()), "'" + path_.string() +
                                             "' is split as in the checkpoint's training, by seed 7 with 0.1 of the "
                                             "rows for validation and 0.2 for test; the options say seed 1, 0.1 and "
                                             "0.2\n");
  const auto of_training = rows_of(*first.train_dataloader()), of_test = rows_of(*second.test_dataloader()[0]);
  EXPECT_EQ(of_training.size(), 70U);
  EXPECT_EQ(of_test, rows_of(*first.test_dataloader()[0]));
  EXPECT_TRUE(std::ranges::none_of(of_test, [&](float row) { return of_training.contains(row); }));
  EXPECT_EQ(second.state().values().size(), first.state().values().size());
  EXPECT_EQ(second.state().get<int64_t>("split/seed"), 7);
}

TEST_F(SplitOfACheckpoint, HoldsForPartsWhoseFractionsTheOptionsChange) {
  TableData first = trained(7);
  TableDataOptions changed = options();
  changed.val_fraction = 0.5;
  TableData second(changed, 7);
  second.setup(EntryPoint::validate);
  EXPECT_THAT(load(second, first.state()), HasSubstr("the options say seed 7, 0.5 and 0.2"));
  EXPECT_EQ(rows_of(*second.val_dataloader()[0]), rows_of(*first.val_dataloader()[0]));
}

TEST_F(SplitOfACheckpoint, IsNoOtherIfTheOptionsAreTheSameOrAFileIsNew) {
  TableData first = trained(7);
  TableData second = trained(7);
  EXPECT_EQ(load(second, first.state()), "");
  TableDataOptions with_file = options();
  with_file.test_path = write_rows(folder_.path() / "new.csv", 200, 230);
  TableData third(with_file, 7);
  third.setup(EntryPoint::test);
  EXPECT_EQ(load(third, first.state()), "");
  EXPECT_EQ(rows_of(*third.test_dataloader()[0]).size(), 30U);
  EXPECT_EQ(rows_of(*third.val_dataloader()[0]), rows_of(*first.val_dataloader()[0]));
}

TEST_F(SplitOfACheckpoint, DoesNotHoldForATableOfAnotherNumberOfRows) {
  TableData first = trained(7);
  TableDataOptions other = options();
  other.path = write_rows(folder_.path() / "b.csv", 0, 200);
  other.test_fraction = 0.5;
  TableData second(other, 7);
  second.setup(EntryPoint::test);
  EXPECT_EQ(load(second, first.state()),
            "warning: '" + other.path.string() +
                "' has 200 rows, but the table that the checkpoint was trained on had 100: it is split by the options, "
                "so that rows of training, if it has them, may be in the parts for validation and test\n");
  EXPECT_EQ(rows_of(*second.test_dataloader()[0]).size(), 100U);
}

TEST_F(SplitOfACheckpoint, OfAnEarlierVersionIsThatOfTheOptions) {
  TableData first = trained(7);
  State state = first.state();
  for (const char* name : {"seed", "val_fraction", "test_fraction", "num_rows"}) {
    state.erase(std::string("split/") + name);
  }
  TableData second = trained(1);
  const auto expected = rows_of(*second.test_dataloader()[0]);
  EXPECT_EQ(load(second, state), "");
  EXPECT_EQ(rows_of(*second.test_dataloader()[0]), expected);
}

TEST_F(SplitOfACheckpoint, ThatIsDamagedIsRefused) {
  TableData data = trained(7);
  State state = data.state();
  state.set("split/test_fraction", 1.5);
  EXPECT_EQ(message_of<CheckpointError>([&] { data.load_state(state); }),
            "the checkpoint's val_fraction (0.1) and test_fraction (1.5) are no parts of a table");
}

TEST_F(SplitOfACheckpoint, APositionAmongOtherRowsIsRefused) {
  TableData first = trained(7), second = trained(1);
  const auto loader = first.train_dataloader(), other = second.train_dataloader();
  for (const auto& each : {loader, other}) each->begin_epoch(0);
  loader->next();
  EXPECT_THAT(message_of<CheckpointError>([&] { other->go_to(loader->position()); }),
              HasSubstr("its digest is another one"));
  load(second, first.state());
  const auto same = second.train_dataloader();
  same->load_state(loader->state());
  same->begin_epoch(0);
  same->go_to(loader->position());
  EXPECT_TRUE(same->next()->operator[]("x").equal(loader->next()->operator[]("x")));
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
