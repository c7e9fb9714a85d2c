#include "fulgur/data/tables/table_schema.h"

#include <arrow/compute/api_vector.h>
#include <arrow/compute/cast.h>
#include <arrow/datum.h>
#include <arrow/table.h>
#include <arrow/type.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fstream>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/data/tables/column.h"
#include "fulgur/data/tables/read_table.h"
#include "fulgur/data/tables/split_table.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;

std::shared_ptr<arrow::Table> table_of(const std::string& csv) {
  const TempDir folder;
  const auto path = folder.path() / "table.csv";
  std::ofstream(path) << csv;
  return read_table(path);
}

const char* const kHouses =
    "area,garden,city,rooms,price\n"
    "1,true,Bonn,3,10.5\n"
    "2,false,Aachen,4,20.5\n"
    ",true,Bonn,3,30.5\n"
    "3,false,,5,40.5\n";

TEST(TableSchema, ChoosesColumnsByTheirTypesIfNoneIsNamed) {
  const auto table = table_of(kHouses);
  const Batch batch = TableSchema::fit(*table, {.target = "price", .standardize = false}).encode(*table);
  EXPECT_TRUE(
      batch["features"].equal(torch::tensor({{1., 1., 3.}, {2., 0., 4.}, {2., 1., 3.}, {3., 0., 5.}}).to(at::kFloat)));
  EXPECT_TRUE(batch["category"].equal(torch::tensor({{2}, {1}, {2}, {3}})));  // sorted; the missing one is the last
  EXPECT_TRUE(batch["label"].equal(torch::tensor({10.5, 20.5, 30.5, 40.5}).to(at::kFloat)));
}

TEST(TableSchema, UsesWhatTrainingHasLearntOnOtherRows) {
  const auto train = table_of("x,kind,y\n1,a,0\n3,b,1\n");
  const auto val = table_of("y,kind,x\n1,b,5\n0,a,\n");
  const TableSchema schema = TableSchema::fit(*train, {.target = "y"});
  const Batch batch = schema.encode(*val);
  EXPECT_TRUE(batch["features"].equal(torch::tensor({{3.F}, {0.F}})));  // (5 - 2) / 1, and the mean
  EXPECT_TRUE(batch["category"].equal(torch::tensor({{2}, {1}})));
  EXPECT_TRUE(batch["label"].equal(torch::tensor({1, 0})));
  EXPECT_THAT(schema.category_sizes(), ElementsAre(3));
  EXPECT_THAT(schema.class_names(), ElementsAre("0", "1"));
}

TEST(TableSchema, ValuesThatTrainingDidNotHaveAreCountedAndHaveAnIndexOfTheirOwn) {
  const auto train = table_of("kind\na\nb\n");
  const auto val = table_of("kind\nc\na\nNA\n");
  const TableSchema schema = TableSchema::fit(*train, {});
  ::testing::internal::CaptureStderr();
  const Batch batch = schema.encode(*val);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "warning: the column 'kind' has values that training did not have in 2 of 3 rows, such as 'c': their index "
            "is 0\n");
  EXPECT_TRUE(batch["category"].equal(torch::tensor({{0}, {1}, {0}})));
}

TEST(TableSchema, MissingFeaturesAreAConstantAndHaveAnIndicatorIfAsked) {
  const auto table = table_of("x,y\n1,4\n,5\nnan,6\n");
  const TableSchema schema = TableSchema::fit(
      *table,
      {.standardize = false, .missing = MissingValues::constant, .constant = -1, .has_missing_indicators = true});
  EXPECT_EQ(schema.num_features(), 3);
  EXPECT_TRUE(schema.encode(*table)["features"].equal(
      torch::tensor({{1., 4., 0.}, {-1., 5., 1.}, {-1., 6., 1.}}).to(at::kFloat)));
}

TEST(TableSchema, AConstantFeatureIsZeroWhenStandardized) {
  const auto table = table_of("x\n7\n7\n");
  EXPECT_TRUE(TableSchema::fit(*table, {}).encode(*table)["features"].equal(torch::zeros({2, 1})));
}

TEST(TableSchema, AConstantFeatureWhoseMeanIsRoundedKeepsItsUnit) {
  std::string csv = "x\n";
  for (int i = 0; i < 100; ++i) csv += "0.7\n";  // the deviation is 1.1e-16
  const auto table = table_of(csv);
  const TableSchema schema = TableSchema::fit(*table, {});
  EXPECT_TRUE(schema.encode(*table)["features"].equal(torch::zeros({100, 1})));
  EXPECT_NEAR(schema.encode(*table_of("x\n0.8\n"))["features"].item<double>(), 0.1, 1e-7);
}

TEST(TableSchema, ASmallDeviationIsAScaleToo) {
  const auto table = table_of("x\n1e-20\n3e-20\n");
  EXPECT_TRUE(TableSchema::fit(*table, {}).encode(*table)["features"].equal(torch::tensor({{-1.F}, {1.F}})));
}

TEST(TableSchema, ColumnsCanBeTensorsOfTheirOwn) {
  const auto table = table_of("id,new,when,x\n9007199254740993,true,1970-01-02 00:00:01,0.5\n");
  const Batch batch = TableSchema::fit(*table, {.tensors = {"id", "new", "when", "x"}}).encode(*table);
  EXPECT_TRUE(batch["id"].equal(torch::tensor({int64_t{9007199254740993}})));
  EXPECT_TRUE(batch["new"].equal(torch::tensor({true})));
  EXPECT_TRUE(batch["when"].equal(torch::tensor({86401})));
  EXPECT_TRUE(batch["x"].equal(torch::tensor({0.5F})));
}

// A column may have whole numbers only in one of the files.
TEST(TableSchema, TensorsHaveTheTypeThatTheyHadInTraining) {
  const auto fractions = table_of("b\n0.5\n1.5\n"), whole = table_of("b\n3\n4\n");
  const TableSchema of_fractions = TableSchema::fit(*fractions, {.tensors = {"b"}});
  const TableSchema of_whole = TableSchema::fit(*whole, {.tensors = {"b"}});
  for (const TableSchema& schema : {of_fractions, TableSchema::from_state(of_fractions.state())}) {
    EXPECT_TRUE(schema.encode(*whole)["b"].equal(torch::tensor({3.0F, 4.0F})));
  }
  EXPECT_TRUE(of_whole.encode(*table_of("b\n16777217.0\n"))["b"].equal(torch::tensor({int64_t{16777217}})));
  EXPECT_EQ(message_of<std::runtime_error>([&] { of_whole.encode(*table_of("b\n3.0\n4.5\n")); }),
            "the column 'b' had the type int64 in training, and is 4.5 in row 2");
}

TEST(TableSchema, PointsInTimeBefore1970AreWholeSecondsRoundedDown) {
  const auto table = table_of("when,day\n1969-12-29 00:00:00.000000000,1969-12-29\n1969-12-31 23:59:59.9,1969-12-31\n");
  const Batch batch = TableSchema::fit(*table, {.tensors = {"when", "day"}}).encode(*table);
  EXPECT_TRUE(batch["when"].equal(torch::tensor({-259200, -1})));
  EXPECT_TRUE(batch["day"].equal(torch::tensor({-259200, -86400})));
}

TEST(TableSchema, PointsInTimeAreSecondsIfTheyAreNamedAsFeatures) {
  const auto table = table_of("when,day,x\n1970-01-01 00:01:00,1970-01-03,1\n");
  EXPECT_EQ(TableSchema::fit(*table, {}).num_features(), 1);
  const TableSchema schema = TableSchema::fit(*table, {.features = {"when", "day"}, .standardize = false});
  EXPECT_TRUE(schema.encode(*table)["features"].equal(torch::tensor({{60.F, 172800.F}})));
}

TEST(TableSchema, ColumnsThatTheirTypesLeaveOutAreLogged) {
  const auto table = table_of("when,day,x,kind\n1970-01-01 00:01:00,1970-01-03,1,a\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(TableSchema::fit(*table, {}).num_features(), 1);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("neither numbers, booleans nor text: when (timestamp[s]), day (date32[day]); name"));
  ::testing::internal::CaptureStderr();
  TableSchema::fit(*table, {.features = {"x"}});
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "the columns were named";
}

TEST(TableSchema, ClassesOfTextAreSorted) {
  const auto table = table_of("x,kind\n1,wet\n2,dry\n");
  const TableSchema schema = TableSchema::fit(*table, {.target = "kind"});
  EXPECT_EQ(schema.num_classes(), 2);
  EXPECT_THAT(schema.class_names(), ElementsAre("dry", "wet"));
  EXPECT_TRUE(schema.encode(*table)["label"].equal(torch::tensor({1, 0})));
}

TEST(TableSchema, AnIntegerTargetIsANumberIfAsked) {
  const auto table = table_of("x,age\n1,30\n2,40\n");
  const TableSchema schema = TableSchema::fit(*table, {.target = "age", .target_type = TargetType::number});
  EXPECT_EQ(schema.num_classes(), 0);
  EXPECT_TRUE(schema.encode(*table)["label"].equal(torch::tensor({30.F, 40.F})));
}

// The table with its column `name` as `column`.
std::shared_ptr<arrow::Table> with_column(const arrow::Table& table, const std::string& name,
                                          const arrow::Result<arrow::Datum>& column) {
  const int index = table.schema()->GetFieldIndex(name);
  const auto values = column.ValueOrDie().chunked_array();
  return table.SetColumn(index, arrow::field(name, values->type()), values).ValueOrDie();
}

TEST(TableSchema, ADictionaryEncodedTargetOfFloatingPointIsANumber) {
  const auto plain = table_of("x,y\n1,0.5\n2,1.5\n3,0.5\n");
  load_compute_functions();
  const auto table = with_column(*plain, "y", arrow::compute::DictionaryEncode(plain->GetColumnByName("y")));
  const TableSchema schema = TableSchema::fit(*table, {.target = "y"});
  EXPECT_EQ(schema.num_classes(), 0);
  EXPECT_TRUE(schema.encode(*table)["label"].equal(torch::tensor({0.5F, 1.5F, 0.5F})));
}

TEST(TableSchema, ADecimalTargetIsANumberOnlyIfAsked) {
  const auto plain = table_of("x,y\n1,0.5\n2,1.5\n");
  load_compute_functions();
  const auto table =
      with_column(*plain, "y", arrow::compute::Cast(plain->GetColumnByName("y"), arrow::decimal128(10, 2)));
  EXPECT_EQ(message_of<std::runtime_error>([&] { TableSchema::fit(*table, {.target = "y"}); }),
            "the column 'y' has 0.5 in row 1: a category is text or a whole number; name the column in features, or "
            "set target_type to number if it is the target");
  const TableSchema schema = TableSchema::fit(*table, {.target = "y", .target_type = TargetType::number});
  EXPECT_TRUE(schema.encode(*table)["label"].equal(torch::tensor({0.5F, 1.5F})));
}

TEST(TableSchema, InputsNeedNoLabel) {
  const TableSchema schema = TableSchema::fit(*table_of("x,y\n1,0\n3,1\n"), {.target = "y"});
  const Batch batch = schema.encode_inputs(*table_of("x\n2\n"));
  EXPECT_FALSE(batch.contains("label"));
  EXPECT_TRUE(batch["features"].equal(torch::zeros({1, 1})));
}

TEST(TableSchema, ComesBackFromItsState) {
  const auto table = table_of(kHouses);
  const TableSchema schema = TableSchema::fit(*table, {.features = {"area"},
                                                       .categories = {"city", "rooms"},
                                                       .tensors = {"garden"},
                                                       .target = "price",
                                                       .target_type = TargetType::number,
                                                       .has_missing_indicators = true});
  const Batch expected = schema.encode(*table);
  const Batch found = TableSchema::from_state(schema.state()).encode(*table);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(found[name].equal(tensor)) << name;
  const TableSchema classes = TableSchema::fit(*table, {.features = {"area"}, .target = "garden"});
  EXPECT_TRUE(TableSchema::from_state(classes.state()).encode(*table)["label"].equal(torch::tensor({1, 0, 1, 0})));
}

TEST(TableSchema, ADamagedStateIsRefused) {
  State state = TableSchema::fit(*table_of("kind\na\nbb\n"), {}).state();
  state.set("categories/0/lengths", torch::tensor({1, 100}));
  EXPECT_EQ(message_of<CheckpointError>([&] { TableSchema::from_state(state); }),
            "the lengths of a vocabulary's values do not fit its text");
  state.set("categories/0/lengths", torch::zeros({2}));
  EXPECT_EQ(message_of<CheckpointError>([&] { TableSchema::from_state(state); }),
            "the vocabulary's 'lengths' is not a list of Long");
}

std::string usage_error(const std::string& csv, const TableSchemaOptions& options) {
  const auto table = table_of(csv);
  return message_of<UsageError>([&] { TableSchema::fit(*table, options); });
}

std::string data_error(const std::string& csv, const TableSchemaOptions& options) {
  const auto table = table_of(csv);
  return message_of<std::runtime_error>([&] { TableSchema::fit(*table, options); });
}

TEST(TableSchema, AColumnThatIsNotThereHasANearestName) {
  EXPECT_EQ(usage_error("area,price\n1,2\n", {.features = {"aera"}}),
            "unknown column 'aera'; did you mean 'area'? known: area, price");
}

TEST(TableSchema, AColumnHasOneUse) {
  EXPECT_EQ(usage_error("x,y\n1,2\n", {.features = {"x", "y"}, .target = "y"}),
            "the column 'y' is named twice; name it once in features, categories, tensors or as the target");
  EXPECT_EQ(usage_error("label,y\n1,2\n", {.tensors = {"label"}}),
            "the column 'label' cannot be a tensor of its own, because that is the name of another tensor; rename it");
}

TEST(TableSchema, TextIsNoFeature) {
  EXPECT_EQ(data_error("x,kind\n1,a\n", {.features = {"kind"}}),
            "the column 'kind' has the type string, which is no number; name it in categories, or leave it out");
}

TEST(TableSchema, AFractionOrADateIsNoCategory) {
  EXPECT_EQ(data_error("x\n1\n1.5\n", {.categories = {"x"}}),
            "the column 'x' has 1.5 in row 2: a category is text or a whole number; name the column in features, or "
            "set target_type to number if it is the target");
  EXPECT_EQ(data_error("day\n1970-01-03\n", {.categories = {"day"}}),
            "the column 'day' has the type date32[day], which is no category; leave it out");
}

TEST(TableSchema, AColumnWithoutValuesIsRefused) {
  EXPECT_EQ(data_error("x,y\n,1\n,2\n", {.features = {"x"}}), "the column 'x' has no values in training; leave it out");
  EXPECT_EQ(data_error("x,y\n,1\n,2\n", {.categories = {"x"}}),
            "the column 'x' has no values in training; leave it out");
}

TEST(TableSchema, MissingFeaturesAreRefusedIfAsked) {
  EXPECT_EQ(data_error("x,y\n1,1\n,2\n", {.features = {"x"}, .missing = MissingValues::refuse}),
            "the column 'x' has no value in 1 of 2 rows, the first is row 2; set missing to mean or constant");
  EXPECT_EQ(data_error("x,y\n1,1\n,2\n", {.tensors = {"x"}}),
            "the column 'x' has no value in 1 of 2 rows, the first is row 2; name it in features, which fill them");
}

TEST(TableSchema, AnInfiniteValueIsRefused) {
  EXPECT_EQ(data_error("x\n1.5\ninf\n", {.features = {"x"}}),
            "the column 'x' has an infinite value in row 2; remove the row, or leave the value empty");
}

TEST(TableSchema, ANumberThatIsTooLargeForFp32IsRefused) {
  EXPECT_THAT(data_error("x\n1e200\n1.5\n2.5\n", {.features = {"x"}}),
              HasSubstr("the column 'x' has numbers that are too large for a mean and a deviation"));
  const auto table = table_of("x,y\n1.5,1e200\n2.5,1.5\n"), other = table_of("x,y\n1e300,1.5\n");
  EXPECT_THAT(message_of<std::runtime_error>([&] { TableSchema::fit(*table, {.features = {"x"}, .target = "y"}); }),
              HasSubstr("the column 'y' has 1e+200 in row 1, which is too large for fp32"));
  const TableSchema schema = TableSchema::fit(*table, {.features = {"x"}});
  EXPECT_THAT(message_of<std::runtime_error>([&] { schema.encode(*other); }), HasSubstr("'x' has 1e+300 in row 1"));
}

TEST(TableSchema, ALabelThatIsMissingIsRefused) {
  const std::string message =
      "the target 'y' has no value in 2 of 3 rows, the first is row 2; remove these rows, or give them a label";
  EXPECT_EQ(data_error("x,y\n1,1\n2,\n3,\n", {.target = "y"}), message);
  EXPECT_EQ(data_error("x,y\n1,1.5\n2,\n3,nan\n", {.target = "y"}), message);
}

TEST(TableSchema, AClassThatTrainingDidNotHaveIsRefused) {
  const TableSchema schema = TableSchema::fit(*table_of("x,y\n1,a\n2,b\n"), {.target = "y"});
  const auto val = table_of("x,y\n1,a\n2,c\n");
  EXPECT_EQ(message_of<std::runtime_error>([&] { schema.encode(*val); }),
            "the target 'y' has the class 'c' in row 2, which training did not have");
}

TEST(TableSchema, TextIsNotTakenForTheNumbersOfTraining) {
  const TableSchema schema = TableSchema::fit(*table_of("k\n1\n2\n"), {.categories = {"k"}});
  const auto val = table_of("k\none\n");
  EXPECT_EQ(message_of<std::runtime_error>([&] { schema.encode(*val); }),
            "the column 'k' has text, but it had numbers in training; convert one of the two");
}

TEST(TableSchema, ATableWithoutRowsOrColumnsIsRefused) {
  const auto empty = table_of("x,y\n1,2\n")->Slice(0, 0);
  EXPECT_EQ(message_of<std::runtime_error>([&] { TableSchema::fit(*empty, {}); }),
            "the table for training has no rows");
  EXPECT_EQ(data_error("y\n1\n", {.target = "y"}),
            "the table has no column of numbers, booleans or text besides the target");
}

TEST(SplitTable, EveryRowIsInOnePartAndTheSeedDecidesWhich) {
  std::string csv = "x\n";
  for (int i = 0; i < 10; ++i) csv += fmt::format("{}\n", i);
  const auto table = table_of(csv);
  const auto parts = split_table(*table, {0.7, 0.2, 0.1}, 1);
  std::vector<at::Tensor> rows;
  for (const auto& part : parts) {
    rows.push_back(TableSchema::fit(*part, {.tensors = {"x"}}).encode(*part)["x"]);
  }
  EXPECT_EQ(rows[0].numel(), 7);
  EXPECT_EQ(rows[1].numel(), 2);
  EXPECT_TRUE(std::get<0>(torch::cat(rows).sort()).equal(torch::arange(10)));
  EXPECT_TRUE(split_table(*table, {0.7, 0.3}, 1)[0]->Equals(*parts[0]));
  EXPECT_FALSE(split_table(*table, {0.7, 0.3}, 2)[0]->Equals(*parts[0]));
}

TEST(SplitTable, RefusesFractionsThatAreNoParts) {
  const auto table = table_of("x\n1\n");
  EXPECT_EQ(message_of<UsageError>([&] { split_table(*table, {0.5, 0.6}, 1); }),
            "split_table: fractions must be at least 0 and add up to 1; got 0.5, 0.6");
}

}  // namespace
}  // namespace fulgur
