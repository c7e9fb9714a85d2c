#pragma once

#include <arrow/type_fwd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"

namespace fulgur {

enum class TableFormat { automatic, csv, json, parquet, arrow };

struct ReadTableOptions {
  TableFormat format = TableFormat::automatic;  // automatic: by the file's extension
  std::string delimiter{};                      // CSV: one character; empty: a comma, in .tsv files a tab
  int64_t skip_rows = 0;                        // CSV: lines before the first row or the row of names
  std::vector<std::string> column_names{};      // CSV: for a file without a row of names; empty: the file has one
  void describe(FieldVisitor& visit);
};

// Reads a file into memory: CSV (.csv, .tsv), JSON lines (.json, .jsonl, .ndjson), Parquet (.parquet), Arrow IPC or
// Feather V2 (.arrow, .feather, .ipc). The types of CSV and JSON columns follow from their values; empty cells, NA, NaN
// and null are missing values. A quoted cell of CSV may have line breaks.
//   const std::shared_ptr<arrow::Table> table = read_table("houses.csv");
// Errors: UsageError for options that do not fit the file; std::runtime_error, with the path and the reason, for a file
// that is missing, damaged or empty, has two columns of one name, or is CSV that is not UTF-8. A damaged file costs no
// more memory than 64 MiB and 1,000 times its size.
// The CSV cells and JSON strings of `text_columns` stay text even if all of them look like numbers, booleans or points
// in time: pass TableSchema::text_columns(), which a schema has learnt as text. Columns that the file lacks are
// ignored.
std::shared_ptr<arrow::Table> read_table(const std::filesystem::path& path, const ReadTableOptions& options = {},
                                         const std::vector<std::string>& text_columns = {});

}  // namespace fulgur
