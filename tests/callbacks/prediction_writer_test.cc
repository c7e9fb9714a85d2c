#include "fulgur/callbacks/prediction_writer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

// Returns its input, a number of each batch, and, if asked, rows that are longer in each loader.
struct Echo : testing::TinyModule {
  Batch predict_step(const Batch& batch, int64_t batch_idx) override {
    const Batch result{{"x", batch["x"]}, {"index", at::full({}, batch_idx)}};
    return wide ? result.with("wide", at::zeros({batch.batch_size(), 1 << 20})) : result;
  }
  bool wide = false;
};

at::Tensor inputs(int64_t size) {
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < size; ++i) rows.push_back(testing::tiny_dataset(size)->get(i)["x"]);
  return at::stack(rows);
}

std::vector<std::string> names_of(const std::vector<fs::path>& files) {
  std::vector<std::string> names;
  for (const fs::path& file : files) names.push_back(file.filename());
  return names;
}

TEST(PredictionWriter, WritesEveryPredictionInOrderAndKeepsNone) {
  const testing::TempDir dir;
  const auto writer = PredictionWriter::make({.dirpath = dir.path()});
  const auto predictions = Trainer(testing::quiet({.callbacks = {writer}}))
                               .predict(make_module<Echo>(), {.predict = testing::tiny_loader(20, 8)});
  EXPECT_THAT(predictions, IsEmpty());
  ASSERT_THAT(names_of(writer->files()), ElementsAre("rank0-part00000.safetensors"));
  const SafetensorsFile part(writer->files()[0]);
  EXPECT_TRUE(part.tensor("x").equal(inputs(20)));
  EXPECT_TRUE(part.tensor("index").equal(at::arange(3)));
  EXPECT_EQ(
      part.metadata(),
      (std::map<std::string, std::string>{
          {"dataloader_idx", "0"}, {"first_batch", "0"}, {"num_batches", "3"}, {"rank", "0"}, {"world_size", "1"}}));
}

TEST(PredictionWriter, BeginsAPartWhereTheLastIsFullOrTheLoaderChanges) {
  const testing::TempDir dir;
  const auto writer = PredictionWriter::make({.dirpath = dir.path(), .part_size_mib = 30});
  const auto module = make_module<Echo>();
  module->wide = true;  // 8 MiB for each batch of two
  const auto loader = [] { return testing::tiny_loader(12, 2); };
  Trainer(testing::quiet({.callbacks = {writer}})).predict(module, {.predict = {loader(), loader()}});
  ASSERT_EQ(writer->files().size(), 4U);
  const std::vector<std::pair<std::string, std::string>> expected{{"0", "4"}, {"4", "2"}, {"0", "4"}, {"4", "2"}};
  for (size_t i = 0; i < 4; ++i) {
    const SafetensorsFile part(writer->files()[i]);
    EXPECT_EQ(part.metadata().at("first_batch"), expected[i].first) << i;
    EXPECT_EQ(part.metadata().at("num_batches"), expected[i].second) << i;
    EXPECT_EQ(part.metadata().at("dataloader_idx"), i < 2 ? "0" : "1") << i;
  }
}

TEST(PredictionWriter, EachRankWritesItsOwn) {
  const testing::TempDir dir;
  testing::run_ranks(2, [&](World&) {
    TrainerOptions options{.devices = 2, .callbacks = {PredictionWriter::make({.dirpath = dir.path()})}};
    Trainer(testing::quiet(options)).predict(make_module<Echo>(), {.predict = testing::tiny_loader(7, 2)});
  });
  const at::Tensor all = inputs(7);
  for (const int64_t rank : {0, 1}) {
    const SafetensorsFile part(dir.path() / fmt::format("rank{}-part00000.safetensors", rank));
    EXPECT_TRUE(part.tensor("x").equal(all.slice(0, rank, std::nullopt, 2))) << rank;
  }
}

TEST(PredictionWriter, OverwritesNothing) {
  const testing::TempDir dir;
  const auto predict = [&] {
    Trainer(testing::quiet({.callbacks = {PredictionWriter::make({.dirpath = dir.path()})}}))
        .predict(make_module<Echo>(), {.predict = testing::tiny_loader(8, 4)});
  };
  predict();
  EXPECT_THAT(message_of<SetupError>(predict), HasSubstr("has predictions of another run; move them away"));
  EXPECT_THAT(message_of<UsageError>([] { PredictionWriter::make({.part_size_mib = 0}); }), HasSubstr("part_size_mib"));
}

}  // namespace
}  // namespace fulgur
