#pragma once

#include <arrow/type_fwd.h>

#include <memory>
#include <string>

namespace fulgur {

// The column of that name. Throws UsageError, with the nearest name, if there is none.
std::shared_ptr<arrow::ChunkedArray> find_column(const arrow::Table& table, const std::string& name);

bool is_number(const arrow::DataType& type);  // integers, floating point, decimals
bool is_time(const arrow::DataType& type);    // timestamps and dates
bool is_text(const arrow::DataType& type);

// The type of a column, or that of its values if it is dictionary-encoded.
const arrow::DataType& value_type(const arrow::ChunkedArray& column);

// The values of numbers, booleans (0 and 1), and points in time (seconds since 1970-01-01 UTC). Missing values and NaN
// are null. Throws std::runtime_error for another type and for an infinite value, with its row.
std::shared_ptr<arrow::DoubleArray> numbers_of(const std::string& name, const arrow::ChunkedArray& column);

// Points in time as int64, whole seconds since 1970-01-01 UTC, rounded down. The column's type must be a time.
std::shared_ptr<arrow::ChunkedArray> seconds_of(const std::string& name, const arrow::ChunkedArray& column);

// The values in the types of a vocabulary: int64 for integers, booleans and whole numbers, large_utf8 for text; a
// column without any value gets the type `if_empty`. Throws std::runtime_error for other types, and for numbers that
// are not whole.
std::shared_ptr<arrow::ChunkedArray> keys_of(const std::string& name, const arrow::ChunkedArray& column,
                                             const std::shared_ptr<arrow::DataType>& if_empty);

// Loads Arrow's compute functions; must be called before the first use of such a function.
void load_compute_functions();

}  // namespace fulgur
