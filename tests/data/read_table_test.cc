#include "fulgur/data/tables/read_table.h"

#include <arrow/array/array_binary.h>
#include <arrow/array/array_primitive.h>
#include <arrow/array/builder_primitive.h>
#include <arrow/io/file.h>
#include <arrow/ipc/writer.h>
#include <arrow/memory_pool.h>
#include <arrow/scalar.h>
#include <arrow/table.h>
#include <arrow/type.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <parquet/arrow/writer.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>

#include "fulgur/base/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;
namespace fs = std::filesystem;

fs::path write_file(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::shared_ptr<arrow::Table> numbers(int64_t count) {
  arrow::Int64Builder whole;
  arrow::DoubleBuilder half;
  for (int64_t i = 0; i < count; ++i) {
    EXPECT_TRUE(whole.Append(i).ok() && half.Append(static_cast<double>(i) / 2).ok());
  }
  const auto schema = arrow::schema({arrow::field("whole", arrow::int64()), arrow::field("half", arrow::float64())});
  return arrow::Table::Make(schema, {whole.Finish().ValueOrDie(), half.Finish().ValueOrDie()});
}

fs::path write_parquet(const fs::path& path, const arrow::Table& table, int64_t row_group_size) {
  const auto file = arrow::io::FileOutputStream::Open(path.string()).ValueOrDie();
  EXPECT_TRUE(parquet::arrow::WriteTable(table, arrow::default_memory_pool(), file, row_group_size).ok());
  EXPECT_TRUE(file->Close().ok());
  return path;
}

fs::path write_arrow(const fs::path& path, const arrow::Table& table) {
  const auto file = arrow::io::FileOutputStream::Open(path.string()).ValueOrDie();
  const auto writer = arrow::ipc::MakeFileWriter(file, table.schema()).ValueOrDie();
  EXPECT_TRUE(writer->WriteTable(table).ok() && writer->Close().ok() && file->Close().ok());
  return path;
}

TEST(ReadTable, FindsNamesAndTypesOfCsv) {
  const TempDir folder;
  const auto table = read_table(write_file(folder.path() / "a.csv", "size,kind,new\n1.5,red,true\n,NA,false\n"));
  EXPECT_THAT(table->ColumnNames(), ElementsAre("size", "kind", "new"));
  EXPECT_EQ(table->schema()->field(0)->type()->ToString(), "double");
  EXPECT_EQ(table->schema()->field(2)->type()->ToString(), "bool");
  EXPECT_EQ(table->column(0)->null_count(), 1);
  EXPECT_EQ(table->column(1)->null_count(), 1);
}

TEST(ReadTable, ReadsCsvWithoutNamesBelowOtherLines) {
  const TempDir folder;
  const auto path = write_file(folder.path() / "a.tsv", "178 rows\n1\tx\n2\ty\n");
  const auto table = read_table(path, {.skip_rows = 1, .column_names = {"number", "letter"}});
  EXPECT_THAT(table->ColumnNames(), ElementsAre("number", "letter"));
  EXPECT_EQ(table->num_rows(), 2);
}

TEST(ReadTable, ColumnsOfTextStayText) {
  const TempDir folder;
  for (const fs::path& path :
       {write_file(folder.path() / "a.csv", "k,x\n2020-01-01,1\n,2\n"),
        write_file(folder.path() / "a.jsonl", "{\"k\": \"2020-01-01\", \"x\": 1}\n{\"x\": 2}\n")}) {
    EXPECT_NE(read_table(path)->schema()->field(0)->type()->ToString(), "string");
    const auto table = read_table(path, {}, {"k", "none"});
    EXPECT_THAT(table->ColumnNames(), ElementsAre("k", "x"));
    EXPECT_EQ(table->schema()->field(0)->type()->ToString(), "string");
    EXPECT_EQ(table->schema()->field(1)->type()->ToString(), "int64");
    EXPECT_EQ(table->column(0)->GetScalar(0).ValueOrDie()->ToString(), "2020-01-01");
    EXPECT_EQ(table->column(0)->null_count(), 1);
  }
}

// Arrow reads blocks of 1 MiB, and each line within a quoted cell looks like a row.
TEST(ReadTable, LineBreaksInQuotedCellsAreNoRowsInLargeFiles) {
  constexpr int kRows = 90'000;
  std::string csv = "label,text\n";
  for (int i = 0; i < kRows; ++i) csv += fmt::format("{},\"one {}\n1,green {}\"\n", i % 2, i, i);
  const TempDir folder;
  const auto table = read_table(write_file(folder.path() / "a.csv", csv));
  ASSERT_EQ(table->num_rows(), kRows);
  const auto columns = table->CombineChunks().ValueOrDie();
  const auto& labels = static_cast<const arrow::Int64Array&>(*columns->column(0)->chunk(0));
  const auto& texts = static_cast<const arrow::StringArray&>(*columns->column(1)->chunk(0));
  int wrong = 0;
  for (int i = 0; i < kRows; ++i) {
    wrong += labels.Value(i) != i % 2 || texts.GetView(i) != fmt::format("one {}\n1,green {}", i, i) ? 1 : 0;
  }
  EXPECT_EQ(wrong, 0);
}

TEST(ReadTable, CsvThatIsNotUtf8IsRefused) {
  const TempDir folder;
  const auto path = write_file(folder.path() / "a.csv", "city,x\nZ\xfcrich,1\n");
  EXPECT_EQ(message_of<std::runtime_error>([&] { read_table(path); }),
            fmt::format("the column 'city' of '{}' is not UTF-8: convert the file, for example by iconv -f latin1 -t "
                        "utf8",
                        path.string()));
  EXPECT_THAT(message_of<std::runtime_error>([&] { read_table(path, {}, {"city"}); }), HasSubstr("invalid UTF8 data"));
}

TEST(ReadTable, AllFormatsGiveTheSameTable) {
  const TempDir folder;
  const auto table = numbers(5);
  std::string csv = "whole,half\n", json;
  for (int i = 0; i < 5; ++i) csv += fmt::format("{},{:.1f}\n", i, i / 2.0);
  for (int i = 0; i < 5; ++i) json += fmt::format("{{\"whole\": {}, \"half\": {:.1f}}}\n", i, i / 2.0);
  for (const fs::path& path :
       {write_file(folder.path() / "a.csv", csv), write_file(folder.path() / "a.jsonl", json),
        write_parquet(folder.path() / "a.parquet", *table, 2), write_arrow(folder.path() / "a.feather", *table)}) {
    EXPECT_TRUE(read_table(path)->Equals(*table, /*check_metadata=*/false)) << path;
  }
}

TEST(ReadTable, AMissingFileIsNamed) {
  EXPECT_EQ(message_of<std::runtime_error>([] { read_table("none/houses.csv"); }),
            "there is no file 'none/houses.csv'");
}

TEST(ReadTable, AnUnknownExtensionIsNoFormat) {
  EXPECT_EQ(message_of<UsageError>([] { read_table("houses.xlsx"); }),
            "'houses.xlsx': the extension '.xlsx' names no format of tables; rename the file, or set format to csv, "
            "json, parquet or arrow. Known: .csv .tsv .json .jsonl .ndjson .parquet .arrow .feather .ipc");
}

TEST(ReadTable, OptionsOfCsvAreRefusedForOtherFormats) {
  const TempDir folder;
  const auto path = write_parquet(folder.path() / "a.parquet", *numbers(5), 2);
  const auto expect_refused = [&](const char* name, const ReadTableOptions& options) {
    EXPECT_EQ(message_of<UsageError>([&] { read_table(path, options); }),
              fmt::format("{} is for CSV, and '{}' is another format; leave it out", name, path.string()));
  };
  expect_refused("delimiter", {.delimiter = ";"});
  expect_refused("skip_rows", {.skip_rows = 1});
  expect_refused("column_names", {.column_names = {"a", "b"}});
}

TEST(ReadTable, ADelimiterIsOneCharacter) {
  const TempDir folder;
  const auto path = write_file(folder.path() / "a.csv", "a;b\n1;2\n");
  EXPECT_EQ(message_of<UsageError>([&] { read_table(path, {.delimiter = "; "}); }),
            "delimiter must be one character; got '; '");
}

// Each damaged file and what is said of it, after the name of the file.
struct Damaged {
  std::string file;
  std::string content;
  std::string message;
};

class ReadDamagedTable : public ::testing::TestWithParam<Damaged> {};

TEST_P(ReadDamagedTable, IsRefusedWithFileAndReason) {
  const TempDir folder;
  const auto path = write_file(folder.path() / GetParam().file, GetParam().content);
  const std::string message = message_of<std::runtime_error>([&] { read_table(path); });
  EXPECT_EQ(message, fmt::format(fmt::runtime(GetParam().message), path.string()));
}

INSTANTIATE_TEST_SUITE_P(
    Formats, ReadDamagedTable,
    ::testing::Values(
        Damaged{"a.csv", "", "cannot read '{}' as csv: Empty CSV file"}, Damaged{"a.csv", "a,b\n", "'{}' has no rows"},
        Damaged{"a.csv", "a,a\n1,2\n", "'{}' has two columns 'a'; rename one of them"},
        Damaged{"a.csv", "a,b\n1,2\n3\n4,5\n",
                "cannot read '{}' as csv: CSV parse error: Row #3: Expected 2 columns, got 1: 3"},
        Damaged{"a.jsonl", "{\"a\": 1}\n{\"a\": \n",
                "cannot read '{}' as json: JSON parse error: Invalid value. in row 1"},
        Damaged{"a.jsonl", "{\"a\": 1}\n{\"a\": \"x\"}\n",
                "cannot read '{}' as json: JSON parse error: Column(/a) changed from number to string in row 1"},
        Damaged{"a.parquet", "a,b\n1,2\n",
                "cannot read '{}' as parquet: Parquet magic bytes not found in footer. Either the file is corrupted or "
                "this is not a parquet file."},
        Damaged{"a.parquet", "", "cannot read '{}' as parquet: Parquet file size is 0 bytes"},
        Damaged{"a.arrow", "a,b\n1,2\n", "cannot read '{}' as arrow: File is too small: 8"},
        Damaged{"a.arrow", "", "cannot read '{}' as arrow: File is too small: 0"}));

// Reads the file and says whether it could; anything else than a table or a runtime_error ends the test.
bool is_readable(const fs::path& path) {
  try {
    read_table(path);
    return true;
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr(path.string()));
    return false;
  }
}

TEST(ReadTable, EveryTruncationOfABinaryFileIsRefused) {
  const TempDir folder;
  const auto table = numbers(50);
  for (const fs::path& path :
       {write_parquet(folder.path() / "a.parquet", *table, 20), write_arrow(folder.path() / "a.arrow", *table)}) {
    const std::string whole = testing::read_file(path);
    for (size_t length = 0; length < whole.size(); length += 7) {
      EXPECT_FALSE(is_readable(write_file(path, whole.substr(0, length)))) << path << " " << length;
    }
  }
}

TEST(ReadTable, ADamagedFileIsATableOrAnErrorAndCostsLittleMemory) {
  const TempDir folder;
  const auto table = numbers(200);
  std::mt19937 random(1);
  for (const fs::path& path :
       {write_parquet(folder.path() / "a.parquet", *table, 60), write_arrow(folder.path() / "a.arrow", *table),
        write_file(folder.path() / "a.jsonl", "{\"a\": 1, \"b\": [1, {\"c\": 2}]}\n{\"a\": 2, \"b\": []}\n"),
        write_file(folder.path() / "a.csv", "a,b\n1,\"x\ny\"\n2,z\n")}) {
    const std::string whole = testing::read_file(path);
    for (int round = 0; round < 300; ++round) {
      std::string damaged = whole;
      for (int i = 0; i < 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
      is_readable(write_file(path, damaged));
    }
  }
  EXPECT_LT(arrow::default_memory_pool()->max_memory(), 80 << 20);
}

TEST(ReadTable, DeepJsonIsRefused) {
  const TempDir folder;
  const std::string deep(900'000, '[');
  const auto path = write_file(folder.path() / "a.jsonl", "{\"a\": " + deep + "\n");
  EXPECT_EQ(message_of<std::runtime_error>([&] { read_table(path); }),
            fmt::format("cannot read '{}' as json: it has more than 64 levels of nesting", path.string()));
}

std::string json_error(const std::string& text) {
  const TempDir folder;
  const auto path = write_file(folder.path() / "a.jsonl", text);
  const std::string prefix = fmt::format("cannot read '{}' as json: ", path.string());
  const std::string message = message_of<std::runtime_error>([&] { read_table(path); });
  EXPECT_THAT(message, ::testing::StartsWith(prefix));
  return message.substr(std::min(message.size(), prefix.size()));
}

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(ReadTable, DeepJsonOverManyLinesIsRefused) {
  const std::string open = std::string(60, '[') + "\n", close = std::string(60, ']') + "\n";
  EXPECT_EQ(json_error("{\"a\":\n" + repeated(open, 1000) + repeated(close, 1000) + "}\n"),
            "it has more than 64 levels of nesting");
}

TEST(ReadTable, DeepJsonBehindAnOpenStringIsRefused) {
  for (const std::string line_end : {"\n", "\r"}) {
    EXPECT_EQ(json_error("{\"a" + line_end + "{\"a\":" + std::string(100'000, '[') + "\n"),
              "it has more than 64 levels of nesting");
  }
}

TEST(ReadTable, JsonThatClosesWhatItDidNotOpenIsRefused) {
  EXPECT_EQ(json_error("{\"a\": 1}\n" + repeated("}}}}\n", 300'000) + "{\"a\":" + std::string(900'000, '[') + "\n"),
            "it closes more brackets than it opens");
}

TEST(ReadTable, BracketsInTextAreNoNesting) {
  const TempDir folder;
  const auto path = write_file(folder.path() / "a.jsonl", repeated(R"({"a": "}][[{\"[[[\\"})"
                                                                   "\n",
                                                                   100));
  EXPECT_EQ(read_table(path)->num_rows(), 100);
}

TEST(ReadTable, AShortFileOfManyColumnsIsRefused) {
  const TempDir folder;
  const std::string commas(900'000, ',');
  const auto path = write_file(folder.path() / "a.csv", commas + "\n");
  EXPECT_EQ(message_of<std::runtime_error>([&] { read_table(path); }),
            fmt::format("cannot read '{}' as csv: it has 900001 columns, too many for a file so small", path.string()));
}

}  // namespace
}  // namespace fulgur
