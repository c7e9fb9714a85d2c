#include "fulgur/data/files/record_dataset.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <fstream>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

class Records : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    const auto file = folder_.path() / name;
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }

  testing::TempDir folder_;
};

TEST_F(Records, FieldsFollowEachOtherInEachOfSeveralFiles) {
  const std::string one("\1abcd\x10\0", 7), two("\2efgh\x20\0", 7), three("\3ijkl\x30\1", 7);
  const auto dataset =
      RecordDataset::make({write("a", one + two), write("b", three)},
                          {{.name = "label"}, {.name = "image", .shape = {2, 2}}, {.name = "id", .dtype = at::kShort}});
  EXPECT_EQ(dataset->size(), 3);
  EXPECT_EQ(dataset->record_bytes(), 7);
  const Batch batch = dataset->get_batch(at::tensor({2, 0, 1}, at::kLong), {});
  EXPECT_TRUE(batch["label"].equal(at::tensor({3, 1, 2}, at::kByte)));
  EXPECT_TRUE(batch["image"][0].equal(at::tensor({'i', 'j', 'k', 'l'}, at::kByte).view({2, 2})));
  EXPECT_TRUE(batch["id"].equal(at::tensor({0x130, 0x10, 0x20}, at::kShort)));
  const at::Tensor strided = at::tensor({2, 1, 0, 1}, at::kLong).view({2, 2}).select(1, 0);
  EXPECT_TRUE(dataset->get_batch(strided, {})["label"].equal(at::tensor({3, 1}, at::kByte)));
  Random random(0);
  EXPECT_EQ(dataset->get(1, random)["image"].sum().item<int64_t>(), 'e' + 'f' + 'g' + 'h');
  EXPECT_EQ(dataset->get(1, random)["label"].dim(), 0);
  EXPECT_THROW(dataset->get(3, random), c10::IndexError);
}

TEST_F(Records, ADigestTellsContentAndLayoutApart) {
  const auto file = write("a", "abcdefgh");
  const auto digest = [&](const RecordField& field) { return RecordDataset({file}, {field}).digest(); };
  const std::string first = digest({.name = "x", .shape = {4}});
  EXPECT_NE(digest({.name = "x", .shape = {2, 2}}), first);
  EXPECT_NE(digest({.name = "x", .dtype = at::kInt}), first);
  write("a", "abcdefgi");
  EXPECT_NE(digest({.name = "x", .shape = {4}}), first);
}

TEST_F(Records, RefusesFilesAndLayoutsThatDoNotFit) {
  const auto file = write("a", "abcdefgh"), empty = write("b", "");
  const auto usage = [&](const std::vector<RecordField>& fields) {
    return testing::message_of<UsageError>([&] { RecordDataset({file}, fields); });
  };
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { RecordDataset({file}, {{.name = "x", .shape = {3}}}); }),
            file.string() +
                ": 8 bytes are not a whole number of records of 3 bytes; the file is cut off, or the fields "
                "are other ones");
  EXPECT_EQ(testing::message_of<std::runtime_error>([&] { RecordDataset({empty}, {{.name = "x"}}); }),
            empty.string() +
                ": 0 bytes are not a whole number of records of 1 bytes; the file is cut off, or the "
                "fields are other ones");
  EXPECT_EQ(usage({}), "RecordDataset: no field is given");
  EXPECT_EQ(usage({{}}), "RecordDataset: a field has no name");
  EXPECT_EQ(usage({{.name = "x"}, {.name = "x"}}), "RecordDataset: there are two fields 'x'");
  EXPECT_EQ(usage({{.name = "x", .shape = {0}}}), "RecordDataset: field 'x' cannot have the shape (0)");
  EXPECT_EQ(usage({{.name = "x", .shape = {1L << 40, 1L << 40}}}),
            "RecordDataset: field 'x' cannot have the shape (1099511627776, 1099511627776)");
  EXPECT_EQ(testing::message_of<UsageError>([] { RecordDataset({}, {{.name = "x"}}); }),
            "RecordDataset: no file is given");
}

}  // namespace
}  // namespace fulgur
