#include "fulgur/data/tables/read_table.h"

#include <arrow/buffer.h>
#include <arrow/csv/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <arrow/json/api.h>
#include <arrow/memory_pool.h>
#include <arrow/table.h>
#include <arrow/type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <parquet/arrow/reader.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>
#include <parquet/properties.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <mutex>
#include <ranges>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/utf8.h"
#include "fulgur/data/tables/arrow_result.h"

namespace fulgur {
namespace {

using Table = std::shared_ptr<arrow::Table>;

// A file that is open, and what reading it may cost.
struct Source {
  std::filesystem::path path;
  int64_t num_bytes;
  int64_t memory_limit;  // bytes
  arrow::MemoryPool* pool;
  std::shared_ptr<arrow::io::ReadableFile> file{};
};

constexpr int64_t kFreeBytes = 64 << 20;
constexpr int64_t kMaxExpansion = 1000;

const std::vector<std::string> kFormatNames{"automatic", "csv", "json", "parquet", "arrow"};

constexpr std::array<std::pair<std::string_view, TableFormat>, 9> kExtensions{{{".csv", TableFormat::csv},
                                                                               {".tsv", TableFormat::csv},
                                                                               {".json", TableFormat::json},
                                                                               {".jsonl", TableFormat::json},
                                                                               {".ndjson", TableFormat::json},
                                                                               {".parquet", TableFormat::parquet},
                                                                               {".arrow", TableFormat::arrow},
                                                                               {".feather", TableFormat::arrow},
                                                                               {".ipc", TableFormat::arrow}}};

TableFormat format_of(const std::filesystem::path& path, TableFormat asked) {
  if (asked != TableFormat::automatic) return asked;
  const std::string extension = path.extension().string();
  const auto* found = std::ranges::find(kExtensions, extension, [](const auto& known) { return known.first; });
  if (found != kExtensions.end()) return found->second;
  throw UsageError(
      fmt::format("'{}': the extension '{}' names no format of tables; rename the file, or set format to "
                  "csv, json, parquet or arrow. Known: {}",
                  path.string(), extension, fmt::join(kExtensions | std::views::keys, " ")));
}

char delimiter_of(const std::filesystem::path& path, const std::string& asked) {
  if (asked.empty()) return path.extension() == ".tsv" ? '\t' : ',';
  if (asked.size() == 1) return asked[0];
  throw UsageError(fmt::format("delimiter must be one character; got '{}'", asked));
}

// What Arrow itself requests for a column, outside of any pool, however short the column is.
constexpr int64_t kBytesPerColumn = 10'000;

arrow::Status check_num_columns(int64_t num_columns, const Source& source) {
  if (num_columns <= source.memory_limit / kBytesPerColumn) return arrow::Status::OK();
  return arrow::Status::Invalid("it has ", num_columns, " columns, too many for a file so small");
}

// The number of columns in the line that has their names, or more if there are delimiters in the names.
arrow::Result<int64_t> count_columns(arrow::io::ReadableFile& file, int64_t skip_rows, char delimiter) {
  constexpr int64_t kBlockBytes = 1 << 20;  // a line that is longer is refused
  ARROW_ASSIGN_OR_RAISE(const auto block, file.Read(kBlockBytes));
  ARROW_RETURN_NOT_OK(file.Seek(0));
  std::string_view text(*block);
  for (; skip_rows > 0 && !text.empty(); --skip_rows)
    text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  return 1 + std::ranges::count(text.substr(0, text.find('\n')), delimiter);
}

// A pool that allocates at most `limit` bytes at a time. Buffers are freed through their pool, whoever has them last,
// so that a pool stays for as long as the process does.
arrow::MemoryPool* limited_pool(int64_t limit) {
  static std::mutex mutex;
  static auto& pools = *new std::deque<arrow::CappedMemoryPool>();
  const std::lock_guard lock(mutex);
  return &pools.emplace_back(arrow::default_memory_pool(), limit);
}

arrow::Result<Table> read_csv(const Source& source, const ReadTableOptions& options,
                              const std::vector<std::string>& text_columns, bool use_threads) {
  auto read = arrow::csv::ReadOptions::Defaults();
  read.use_threads = use_threads;
  read.skip_rows = static_cast<int32_t>(options.skip_rows);
  read.column_names = options.column_names;
  auto parse = arrow::csv::ParseOptions::Defaults();
  parse.delimiter = delimiter_of(source.path, options.delimiter);
  parse.newlines_in_values = true;  // otherwise Arrow cuts the file into blocks within quoted cells, too
  auto convert = arrow::csv::ConvertOptions::Defaults();
  convert.strings_can_be_null = true;
  for (const std::string& name : text_columns) convert.column_types[name] = arrow::utf8();
  ARROW_ASSIGN_OR_RAISE(const auto reader, arrow::csv::TableReader::Make(arrow::io::IOContext(source.pool), source.file,
                                                                         read, parse, convert));
  return reader->Read();
}

// Only the serial reader knows the numbers of rows, so that it reads a damaged file a second time.
arrow::Result<Table> read_csv(const Source& source, const ReadTableOptions& options,
                              const std::vector<std::string>& text_columns) {
  if (options.column_names.empty()) {
    const char delimiter = delimiter_of(source.path, options.delimiter);
    ARROW_ASSIGN_OR_RAISE(const int64_t num_columns, count_columns(*source.file, options.skip_rows, delimiter));
    ARROW_RETURN_NOT_OK(check_num_columns(num_columns, source));
  }
  arrow::Result<Table> table = read_csv(source, options, text_columns, /*use_threads=*/true);
  if (table.ok()) return table;
  ARROW_RETURN_NOT_OK(source.file->Seek(0));
  return read_csv(source, options, text_columns, /*use_threads=*/false);
}

// Arrow's JSON parser calls itself for each level of nesting, so that many '[' would overflow the stack. It cuts the
// file at line ends into blocks and parses each block on its own. A line end outside of text is white space, so that
// nesting continues; a line end inside of text is an error that ends the block. A depth that never falls below 0 is at
// least the depth that the parser finds in each block.
arrow::Status check_nesting(arrow::io::ReadableFile& file) {
  constexpr int64_t kChunkBytes = 1 << 20;
  constexpr int kMaxDepth = 64;
  int depth = 0;
  bool is_in_string = false, is_escaped = false;
  for (;;) {
    ARROW_ASSIGN_OR_RAISE(const auto chunk, file.Read(kChunkBytes));
    if (chunk->size() == 0) return file.Seek(0);
    for (const char c : std::string_view(*chunk)) {
      if (c == '\n' || c == '\r') {
        is_in_string = is_escaped = false;
      } else if (is_escaped) {
        is_escaped = false;
      } else if (is_in_string) {
        is_escaped = c == '\\';
        is_in_string = c != '"';
      } else if (c == '"') {
        is_in_string = true;
      } else if (c == '[' || c == '{') {
        if (++depth > kMaxDepth) return arrow::Status::Invalid("it has more than ", kMaxDepth, " levels of nesting");
      } else if (c == ']' || c == '}') {
        if (--depth < 0) return arrow::Status::Invalid("it closes more brackets than it opens");
      }
    }
  }
}

arrow::Result<Table> read_json(const Source& source, const arrow::json::ParseOptions& options) {
  ARROW_ASSIGN_OR_RAISE(
      const auto reader,
      arrow::json::TableReader::Make(source.pool, source.file, arrow::json::ReadOptions::Defaults(), options));
  return reader->Read();
}

// Only strings that look like points in time become something else. They are read again as text, because a column that
// is given a type beforehand need not be in the file, and would then be one of missing values.
arrow::Result<Table> read_json(const Source& source, const std::vector<std::string>& text_columns) {
  ARROW_RETURN_NOT_OK(check_nesting(*source.file));
  auto options = arrow::json::ParseOptions::Defaults();
  ARROW_ASSIGN_OR_RAISE(Table table, read_json(source, options));
  arrow::FieldVector text_fields;
  for (const auto& field : table->schema()->fields()) {
    const bool is_text = std::ranges::find(text_columns, field->name()) != text_columns.end();
    if (!is_text || field->type()->id() != arrow::Type::TIMESTAMP) continue;
    text_fields.push_back(arrow::field(field->name(), arrow::utf8()));
  }
  if (text_fields.empty()) return table;
  options.explicit_schema = arrow::schema(std::move(text_fields));
  ARROW_RETURN_NOT_OK(source.file->Seek(0));
  return read_json(source, options);
}

// Reads one row group after the other, so that what is not decoded yet costs no memory.
arrow::Result<Table> read_parquet(const Source& source) {
  const auto limit = static_cast<int32_t>(std::min<int64_t>(source.num_bytes, std::numeric_limits<int32_t>::max()));
  parquet::ReaderProperties properties(source.pool);
  properties.set_thrift_string_size_limit(std::min(properties.thrift_string_size_limit(), limit));
  properties.set_thrift_container_size_limit(std::min(properties.thrift_container_size_limit(), limit));
  parquet::arrow::FileReaderBuilder builder;
  ARROW_RETURN_NOT_OK(builder.Open(source.file, properties));
  ARROW_RETURN_NOT_OK(check_num_columns(builder.raw_reader()->metadata()->num_columns(), source));
  parquet::ArrowReaderProperties arrow_properties;
  arrow_properties.set_use_threads(true);
  ARROW_ASSIGN_OR_RAISE(const auto reader, builder.memory_pool(source.pool)->properties(arrow_properties)->Build());
  std::vector<Table> row_groups;
  for (int i = 0; i < reader->num_row_groups(); ++i) {
    ARROW_ASSIGN_OR_RAISE(row_groups.emplace_back(), reader->ReadRowGroup(i));
  }
  if (row_groups.empty()) return reader->ReadTable();
  return arrow::ConcatenateTables(row_groups);
}

arrow::Result<Table> read_ipc(const Source& source) {
  auto options = arrow::ipc::IpcReadOptions::Defaults();
  options.memory_pool = source.pool;
  ARROW_ASSIGN_OR_RAISE(const auto reader, arrow::ipc::RecordBatchFileReader::Open(source.file, options));
  ARROW_RETURN_NOT_OK(check_num_columns(reader->schema()->num_fields(), source));
  std::vector<std::shared_ptr<arrow::RecordBatch>> batches(static_cast<size_t>(reader->num_record_batches()));
  for (size_t i = 0; i < batches.size(); ++i) {
    ARROW_ASSIGN_OR_RAISE(batches[i], reader->ReadRecordBatch(static_cast<int>(i)));
  }
  return arrow::Table::FromRecordBatches(reader->schema(), batches);
}

arrow::Result<Table> read_file(const Source& source, TableFormat format, const ReadTableOptions& options,
                               const std::vector<std::string>& text_columns) {
  switch (format) {
    case TableFormat::automatic:
      break;
    case TableFormat::csv:
      return read_csv(source, options, text_columns);
    case TableFormat::json:
      return read_json(source, text_columns);
    case TableFormat::parquet:
      return read_parquet(source);
    case TableFormat::arrow:
      return read_ipc(source);
  }
  return arrow::Status::Invalid("no format");
}

void check_columns(const arrow::Table& table, const std::filesystem::path& path) {
  std::set<std::string> names;
  for (const std::string& name : table.ColumnNames()) {
    if (names.insert(name).second) continue;
    throw std::runtime_error(fmt::format("'{}' has two columns '{}'; rename one of them", path.string(), name));
  }
}

// Arrow makes a column of bytes of CSV cells that are not UTF-8.
void check_is_utf8(const arrow::Table& table, const std::filesystem::path& path) {
  for (const auto& field : table.schema()->fields()) {
    if (field->type()->id() != arrow::Type::BINARY && is_utf8(field->name())) continue;
    throw std::runtime_error(
        fmt::format("the column '{}' of '{}' is not UTF-8: convert the file, for example by iconv -f latin1 -t utf8",
                    field->name(), path.string()));
  }
}

void check_is_not_for_csv(const std::filesystem::path& path, const ReadTableOptions& options) {
  const std::string_view given = !options.delimiter.empty()      ? "delimiter"
                                 : options.skip_rows > 0         ? "skip_rows"
                                 : !options.column_names.empty() ? "column_names"
                                                                 : "";
  if (given.empty()) return;
  throw UsageError(fmt::format("{} is for CSV, and '{}' is another format; leave it out", given, path.string()));
}

}  // namespace

void ReadTableOptions::describe(FieldVisitor& visit) {
  visit({.name = "format", .help = "format of the file; automatic: by its extension", .choices = kFormatNames},
        &format);
  visit({.name = "delimiter", .help = "character between the cells of CSV; empty: a comma, in .tsv files a tab"},
        &delimiter);
  visit({.name = "skip_rows", .help = "lines of CSV to skip at the beginning", .min = 0, .max = 1 << 30}, &skip_rows);
  visit({.name = "column_names", .help = "names of the columns of CSV; empty: the first line has them"}, &column_names);
}

Table read_table(const std::filesystem::path& path, const ReadTableOptions& options,
                 const std::vector<std::string>& text_columns) {
  check_fields("read_table", options);
  const TableFormat format = format_of(path, options.format);
  if (format != TableFormat::csv) check_is_not_for_csv(path, options);
  const std::string what =
      fmt::format("cannot read '{}' as {}", path.string(), kFormatNames[static_cast<size_t>(format)]);
  if (!std::filesystem::is_regular_file(path))
    throw std::runtime_error(fmt::format("there is no file '{}'", path.string()));
  const auto num_bytes = static_cast<int64_t>(std::filesystem::file_size(path));
  const int64_t limit = kFreeBytes + kMaxExpansion * num_bytes;
  Source source{.path = path, .num_bytes = num_bytes, .memory_limit = limit, .pool = limited_pool(limit)};
  source.file = value_of(arrow::io::ReadableFile::Open(path.string(), source.pool), what);
  Table table;
  try {
    table = value_of(read_file(source, format, options, text_columns), what);
    check_status(table->ValidateFull(), what);
  } catch (const parquet::ParquetException& error) {
    throw std::runtime_error(fmt::format("{}: {}", what, error.what()));
  }
  if (table->num_rows() == 0 || table->num_columns() == 0) {
    throw std::runtime_error(fmt::format("'{}' has no rows", path.string()));
  }
  if (table->num_rows() > limit) {
    throw std::runtime_error(fmt::format("{}: it claims {} rows in {} bytes", what, table->num_rows(), num_bytes));
  }
  check_columns(*table, path);
  if (format == TableFormat::csv) check_is_utf8(*table, path);
  return table;
}

}  // namespace fulgur
