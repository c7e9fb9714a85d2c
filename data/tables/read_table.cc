#include "fulgur/data/tables/read_table.h"

#include <arrow/buffer.h>
#include <arrow/csv/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <arrow/json/api.h>
#include <arrow/memory_pool.h>
#include <arrow/table.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <parquet/arrow/reader.h>
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
#include "fulgur/data/tables/arrow_result.h"

namespace fulgur {
namespace {

using Table = std::shared_ptr<arrow::Table>;
using File = std::shared_ptr<arrow::io::ReadableFile>;

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
  throw UsageError(fmt::format("'{}': the extension '{}' names no format of tables; rename the file, or set format to "
                               "csv, json, parquet or arrow. Known: {}",
                               path.string(), extension, fmt::join(kExtensions | std::views::keys, " ")));
}

char delimiter_of(const std::filesystem::path& path, const std::string& asked) {
  if (asked.empty()) return path.extension() == ".tsv" ? '\t' : ',';
  if (asked.size() == 1) return asked[0];
  throw UsageError(fmt::format("delimiter must be one character; got '{}'", asked));
}

// A pool that allocates at most `limit` bytes at a time. Buffers are freed through their pool, whoever has them last, so
// that a pool stays for as long as the process does.
arrow::MemoryPool* limited_pool(int64_t limit) {
  static std::mutex mutex;
  static auto& pools = *new std::deque<arrow::CappedMemoryPool>();
  const std::lock_guard lock(mutex);
  return &pools.emplace_back(arrow::default_memory_pool(), limit);
}

arrow::Result<Table> read_csv(const std::filesystem::path& path, const File& file, arrow::MemoryPool* pool,
                              const ReadTableOptions& options, bool use_threads) {
  auto read = arrow::csv::ReadOptions::Defaults();
  read.use_threads = use_threads;
  read.skip_rows = static_cast<int32_t>(options.skip_rows);
  read.column_names = options.column_names;
  auto parse = arrow::csv::ParseOptions::Defaults();
  parse.delimiter = delimiter_of(path, options.delimiter);
  auto convert = arrow::csv::ConvertOptions::Defaults();
  convert.strings_can_be_null = true;
  ARROW_ASSIGN_OR_RAISE(const auto reader,
                        arrow::csv::TableReader::Make(arrow::io::IOContext(pool), file, read, parse, convert));
  return reader->Read();
}

// Only the serial reader knows the numbers of rows, so that it reads a damaged file a second time.
arrow::Result<Table> read_csv(const std::filesystem::path& path, const File& file, arrow::MemoryPool* pool,
                              const ReadTableOptions& options) {
  arrow::Result<Table> table = read_csv(path, file, pool, options, /*use_threads=*/true);
  if (table.ok()) return table;
  ARROW_RETURN_NOT_OK(file->Seek(0));
  return read_csv(path, file, pool, options, /*use_threads=*/false);
}

// Arrow's JSON parser calls itself for each level of nesting, so that a line of many '[' would overflow the stack.
arrow::Status check_nesting(arrow::io::ReadableFile& file) {
  constexpr int64_t kChunkBytes = 1 << 20;
  constexpr int kMaxDepth = 64;
  int depth = 0;
  bool is_in_string = false, is_escaped = false;
  for (;;) {
    ARROW_ASSIGN_OR_RAISE(const auto chunk, file.Read(kChunkBytes));
    if (chunk->size() == 0) return file.Seek(0);
    for (const char c : std::string_view(*chunk)) {
      if (c == '\n') {
        depth = 0;
        is_in_string = is_escaped = false;
      } else if (is_escaped) {
        is_escaped = false;
      } else if (is_in_string) {
        is_escaped = c == '\\';
        is_in_string = c != '"';
      } else if (c == '"') {
        is_in_string = true;
      } else if (c == '[' || c == '{') {
        if (++depth > kMaxDepth) return arrow::Status::Invalid("a line has more than ", kMaxDepth, " levels of nesting");
      } else if (c == ']' || c == '}') {
        --depth;
      }
    }
  }
}

arrow::Result<Table> read_json(const File& file, arrow::MemoryPool* pool) {
  ARROW_RETURN_NOT_OK(check_nesting(*file));
  ARROW_ASSIGN_OR_RAISE(const auto reader,
                        arrow::json::TableReader::Make(pool, file, arrow::json::ReadOptions::Defaults(),
                                                       arrow::json::ParseOptions::Defaults()));
  return reader->Read();
}

// Reads one row group after the other, so that what is not decoded yet costs no memory.
arrow::Result<Table> read_parquet(const File& file, int64_t file_size, arrow::MemoryPool* pool) {
  const auto limit = static_cast<int32_t>(std::min<int64_t>(file_size, std::numeric_limits<int32_t>::max()));
  parquet::ReaderProperties properties(pool);
  properties.set_thrift_string_size_limit(std::min(properties.thrift_string_size_limit(), limit));
  properties.set_thrift_container_size_limit(std::min(properties.thrift_container_size_limit(), limit));
  parquet::arrow::FileReaderBuilder builder;
  ARROW_RETURN_NOT_OK(builder.Open(file, properties));
  parquet::ArrowReaderProperties arrow_properties;
  arrow_properties.set_use_threads(true);
  ARROW_ASSIGN_OR_RAISE(const auto reader, builder.memory_pool(pool)->properties(arrow_properties)->Build());
  std::vector<Table> row_groups;
  for (int i = 0; i < reader->num_row_groups(); ++i) {
    ARROW_ASSIGN_OR_RAISE(row_groups.emplace_back(), reader->ReadRowGroup(i));
  }
  if (row_groups.empty()) return reader->ReadTable();
  return arrow::ConcatenateTables(row_groups);
}

arrow::Result<Table> read_ipc(const File& file, arrow::MemoryPool* pool) {
  auto options = arrow::ipc::IpcReadOptions::Defaults();
  options.memory_pool = pool;
  ARROW_ASSIGN_OR_RAISE(const auto reader, arrow::ipc::RecordBatchFileReader::Open(file, options));
  std::vector<std::shared_ptr<arrow::RecordBatch>> batches(static_cast<size_t>(reader->num_record_batches()));
  for (size_t i = 0; i < batches.size(); ++i) {
    ARROW_ASSIGN_OR_RAISE(batches[i], reader->ReadRecordBatch(static_cast<int>(i)));
  }
  return arrow::Table::FromRecordBatches(reader->schema(), batches);
}

arrow::Result<Table> read_file(const std::filesystem::path& path, TableFormat format, const File& file,
                               int64_t file_size, arrow::MemoryPool* pool, const ReadTableOptions& options) {
  switch (format) {
    case TableFormat::automatic:
      break;
    case TableFormat::csv:
      return read_csv(path, file, pool, options);
    case TableFormat::json:
      return read_json(file, pool);
    case TableFormat::parquet:
      return read_parquet(file, file_size, pool);
    case TableFormat::arrow:
      return read_ipc(file, pool);
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

}  // namespace

void ReadTableOptions::describe(FieldVisitor& visit) {
  visit({.name = "format", .help = "format of the file; automatic: by its extension", .choices = kFormatNames},
        &format);
  visit({.name = "delimiter", .help = "character between the cells of CSV; empty: a comma, in .tsv files a tab"},
        &delimiter);
  visit({.name = "skip_rows", .help = "lines of CSV to skip at the beginning", .min = 0, .max = 1 << 30}, &skip_rows);
  visit({.name = "column_names", .help = "names of the columns of CSV; empty: the first line has them"},
        &column_names);
}

Table read_table(const std::filesystem::path& path, const ReadTableOptions& options) {
  check_fields("read_table", options);
  const TableFormat format = format_of(path, options.format);
  const std::string what = fmt::format("cannot read '{}' as {}", path.string(), kFormatNames[static_cast<size_t>(format)]);
  if (!std::filesystem::is_regular_file(path)) throw std::runtime_error(fmt::format("there is no file '{}'", path.string()));
  const auto file_size = static_cast<int64_t>(std::filesystem::file_size(path));
  const int64_t limit = kFreeBytes + kMaxExpansion * file_size;
  arrow::MemoryPool* pool = limited_pool(limit);
  const File file = value_of(arrow::io::ReadableFile::Open(path.string(), pool), what);
  Table table;
  try {
    table = value_of(read_file(path, format, file, file_size, pool, options), what);
    check_status(table->ValidateFull(), what);
  } catch (const parquet::ParquetException& error) {
    throw std::runtime_error(fmt::format("{}: {}", what, error.what()));
  }
  if (table->num_rows() == 0 || table->num_columns() == 0) {
    throw std::runtime_error(fmt::format("'{}' has no rows", path.string()));
  }
  if (table->num_rows() > limit) {
    throw std::runtime_error(fmt::format("{}: it claims {} rows in {} bytes", what, table->num_rows(), file_size));
  }
  check_columns(*table, path);
  return table;
}

}  // namespace fulgur
